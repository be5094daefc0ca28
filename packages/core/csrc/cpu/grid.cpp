// The operations on grids of scales: the division of a matrix, and the order in which memory is
// read. There is no arithmetic on elements here.
//
// A region is a rectangle made of whole shared blocks of both sides. Where regions fit in the
// second-level cache, each is read from memory once: its amaxes, its scales and both casts follow
// one another, and threads share the regions. Otherwise the whole matrix is one region, whose
// panels the threads share: it is read twice.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "../numerics.h"
#include "kernels.h"
#include "parallel.h"

namespace ottava {
namespace {

constexpr int64_t kRegionElements = 128 << 10;
constexpr int64_t kPanelRows = 128;
constexpr int64_t kHalfLine = 32;            // elements
constexpr int64_t kNearElements = 32 << 10;  // are still in the caches when they are read again

struct Rectangle {
    int64_t row, col, rows, cols;
};

// The number of blocks of `n` elements, and the number of elements of a block. A block of size 0
// has all elements.
int64_t blocks_in(int64_t n, int64_t block) {
    return block == 0 ? 1 : ceil_div(n, block);
}
int64_t extent(int64_t n, int64_t block) {
    return block == 0 ? std::max<int64_t>(n, 1) : block;
}

// The smallest common multiple, or `n` if the multiple is larger.
int64_t common(int64_t a, int64_t b, int64_t n) {
    if (a >= n || b >= n) return n;
    const int64_t factor = a / std::gcd(a, b);
    return factor > n / b ? n : factor * b;
}

int64_t multiple_within(int64_t limit, int64_t unit) {
    return std::max(limit / unit, int64_t{1}) * unit;
}

// Calls body(panel) for the panels of a rectangle, the last ones first.
template <class Body>
void over_panels(const Rectangle& of, int threads, const Body& body) {
    const int64_t across = ceil_div(of.cols, kPanelCols), down = ceil_div(of.rows, kPanelRows);
    in_parallel(across * down, of.rows * of.cols, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = end - 1; i >= begin; --i) {
            const int64_t row = i / across * kPanelRows, col = i % across * kPanelCols;
            body(Rectangle{row, col, std::min(kPanelRows, of.rows - row),
                           std::min(kPanelCols, of.cols - col)});
        }
    });
}

struct Matrix {
    const void* src;
    Dtype dtype;
    int64_t rows, cols;

    // A panel of a rectangle, whose position counts from the rectangle's.
    GridPanel panel(const Rectangle& in, const Rectangle& at) const {
        const void* first = advance(src, (in.row + at.row) * cols + in.col + at.col, dtype);
        return {first, cols, at.row, at.col, at.rows, at.cols, 0};
    }
    Rectangle all() const { return {0, 0, rows, cols}; }
};

// The amaxes, multipliers and scales of the shared blocks of one rectangle.
class SharedBlocks {
    int64_t rows_, cols_;  // of a block, 0 being all
    int64_t down_ = 0, across_ = 0;
    std::vector<float> memory_;
    float *amaxes_ = nullptr, *multipliers_ = nullptr,
          *scales_ = nullptr;  // each with room for kGridLanes more

public:
    explicit SharedBlocks(const GridSide& side)
        : rows_(side.shared_rows), cols_(side.shared_cols) {}

    void begin(const Rectangle& in) {
        down_ = blocks_in(in.rows, rows_);
        across_ = blocks_in(in.cols, cols_);
        const auto room = static_cast<size_t>(down_ * across_ + kGridLanes);
        memory_.resize(3 * room);
        amaxes_ = memory_.data(), multipliers_ = amaxes_ + room, scales_ = multipliers_ + room;
        std::fill_n(amaxes_, room, 0.0f);
    }

    GridBlocks blocks(const Rectangle& in, float* values) const {
        return {extent(in.rows, rows_), extent(in.cols, cols_), values, across_};
    }
    GridBlocks amaxes(const Rectangle& in) { return blocks(in, amaxes_); }
    GridBlocks multipliers(const Rectangle& in) { return blocks(in, multipliers_); }
    uint8_t* scales() { return reinterpret_cast<uint8_t*>(scales_); }

    // Whether scales are computed row by row (see GridRows): the blocks allow it, and the region is
    // so large that a second reading would cost time.
    bool by_row(const Rectangle& in) const {
        const int64_t width = extent(in.cols, cols_);
        return in.rows * in.cols > kNearElements && in.cols <= kPanelCols &&
               extent(in.rows, rows_) == 1 && (width % kHalfLine == 0 || width >= in.cols);
    }

    void find_scales(Stored element, const ScaleRule& rule, int threads) {
        const Kernels& kernels = active_kernels();
        const int64_t n = down_ * across_, each = rule.e8m0 ? 1 : sizeof(float);
        in_parallel(ceil_div(n, kUnit), n, threads, [&](int64_t begin, int64_t end, int) {
            const int64_t from = begin * kUnit, count = std::min(end * kUnit, n) - from;
            kernels.grid_scales(amaxes_ + from, count, element, rule, multipliers_ + from,
                                scales() + from * each);
        });
    }

    // Writes the scales of a side's blocks in the rectangle. T is the type in which they are
    // stored.
    template <class T>
    void put_scales(const GridSide& side, const Matrix& matrix, const Rectangle& in) const {
        const auto* scales = reinterpret_cast<const T*>(scales_);
        auto* out = static_cast<T*>(side.scales);
        int64_t down = blocks_in(in.rows, side.block_rows),
                across = blocks_in(in.cols, side.block_cols);
        const int64_t first_row = in.row / extent(matrix.rows, side.block_rows);
        const int64_t first_col = in.col / extent(matrix.cols, side.block_cols);
        const int64_t all_down = blocks_in(matrix.rows, side.block_rows);
        const int64_t all_across = blocks_in(matrix.cols, side.block_cols);
        // The number of blocks in a shared block.
        const int64_t high = rows_ == 0 ? std::max<int64_t>(down, 1) : rows_ / side.block_rows;
        const int64_t wide = cols_ == 0 ? std::max<int64_t>(across, 1) : cols_ / side.block_cols;
        // All scales are one run.
        if (high == 1 && wide == 1 && !side.turned && across == all_across)
            across *= std::exchange(down, 1);
        for (int64_t i = 0; i < down; ++i) {
            const T* from = scales + (high == 1 ? i : i / high) * across_;
            const int64_t step = side.turned ? all_down : 1;
            T* to = out + (first_row + i) * (side.turned ? 1 : all_across) + first_col * step;
            if (wide == 1 && step == 1) {
                memcpy(to, from, static_cast<size_t>(across) * sizeof(T));
                continue;
            }
            for (int64_t k = 0; k < across; ++from)
                for (const int64_t end = std::min(k + wide, across); k < end; ++k)
                    to[k * step] = *from;
        }
    }
};

// One cast of a panel: the side whose data it writes, and another side that has the same values.
struct Cast {
    const GridSide* side;
    const GridSide* same;  // or null
    SharedBlocks* blocks;

    GridOut out(const Matrix& matrix, int64_t row, int64_t col, bool stream) const {
        GridOut to{};
        to.stride = matrix.cols;
        to.columns_stride = matrix.rows;
        to.stream = stream;
        for (const GridSide* each : {side, same}) {
            if (each == nullptr) continue;
            if (each->turned)
                to.columns = each->data + col * matrix.rows + row;
            else
                (to.rows == nullptr ? to.rows : to.rows_again) =
                    each->data + row * matrix.cols + col;
        }
        return to;
    }
};

class Quantization {
    const Matrix matrix_;
    const Stored element_;
    const ScaleRule rule_;
    const GridSide* const sides_;
    const int count_;
    const bool same_;                        // both sides have the same shared blocks
    int64_t unit_rows_ = 1, unit_cols_ = 1;  // of which a region is made

    // The memory of one thread, or of all threads if the matrix is one region.
    struct Workspace {
        std::vector<SharedBlocks> blocks;
        std::vector<Cast> casts;
    };

    Workspace workspace() const {
        Workspace work;
        work.blocks.reserve(2), work.casts.reserve(2);
        for (int k = 0; k < (same_ ? 1 : count_); ++k) work.blocks.emplace_back(sides_[k]);
        const bool at_once = same_ && !(sides_[0].turned && sides_[1].turned);
        for (int k = 0; k < (at_once ? 1 : count_); ++k)
            work.casts.push_back(
                {sides_ + k, at_once ? sides_ + 1 : nullptr, &work.blocks[same_ ? 0 : k]});
        return work;
    }

    // Quantizes one region. While its elements are cast, those of the `next` region are prefetched;
    // `next` of the last region is the region itself.
    void region(const Rectangle& in, const Rectangle& next, Workspace& work, int threads) const {
        const Kernels& kernels = active_kernels();
        const bool stream = matrix_.rows * matrix_.cols >= kStreamBytes, whole = threads > 1;
        const auto out = [&](const Cast& cast, const Rectangle& at) {
            return cast.out(matrix_, in.row + at.row, in.col + at.col, stream);
        };
        const Cast* by_row = nullptr;
        for (SharedBlocks& blocks : work.blocks) blocks.begin(in);
        for (const Cast& cast : work.casts)
            if (by_row == nullptr && !whole && cast.blocks->by_row(in)) by_row = &cast;
        GridBlocks amaxes[2];
        int count = 0;
        if (by_row != nullptr) amaxes[count++] = by_row->blocks->amaxes(in);
        for (SharedBlocks& blocks : work.blocks)
            if (by_row == nullptr || by_row->blocks != &blocks) amaxes[count++] = blocks.amaxes(in);
        over_panels(in, threads, [&](const Rectangle& at) {
            GridPanel panel = matrix_.panel(in, at);
            panel.ahead = matrix_.cols;
            if (by_row == nullptr)
                return kernels.grid_amax(panel, matrix_.dtype, amaxes, count, whole);
            SharedBlocks& blocks = *by_row->blocks;
            const GridRows rows{amaxes, count, blocks.multipliers(in), blocks.scales(), &rule_};
            kernels.grid_rows(panel, matrix_.dtype, rows, element_, out(*by_row, at));
        });
        for (SharedBlocks& blocks : work.blocks)
            if (by_row == nullptr || by_row->blocks != &blocks)
                blocks.find_scales(element_, rule_, threads);
        for (int k = 0; k < count_; ++k) {
            const SharedBlocks& blocks = work.blocks[same_ ? 0 : static_cast<size_t>(k)];
            if (rule_.e8m0)
                blocks.put_scales<uint8_t>(sides_[k], matrix_, in);
            else
                blocks.put_scales<float>(sides_[k], matrix_, in);
        }
        over_panels(in, threads, [&](const Rectangle& at) {
            GridPanel panel = matrix_.panel(in, at);
            panel.ahead = (next.row - in.row) * matrix_.cols + next.col - in.col;
            if (panel.ahead == 0) panel.ahead = matrix_.cols;
            for (const Cast& cast : work.casts) {
                if (&cast == by_row) continue;
                kernels.grid_cast(panel, matrix_.dtype, cast.blocks->multipliers(in), true,
                                  element_, out(cast, at));
                panel.ahead = 0;
            }
        });
    }

    // The size of a region that stays in the caches.
    Rectangle cached_region(int threads) const {
        const int64_t lines = common(unit_cols_, 64, matrix_.cols);
        const int64_t unit =
            lines * unit_rows_ <= kRegionElements && lines <= kPanelCols ? lines : unit_cols_;
        int64_t width = multiple_within(std::min(kPanelCols, kRegionElements / unit_rows_), unit);
        // For regions of fewer rows the start takes as long as the work.
        const int64_t height = multiple_within(
            std::min(kTileRows, std::max(kRegionElements / width, int64_t{1})), unit_rows_);
        // Each thread gets at least two regions where the matrix allows it.
        const int64_t down = ceil_div(matrix_.rows, height);
        while (width > unit && down * ceil_div(matrix_.cols, width) < 2 * threads)
            width = multiple_within(width / 2, unit);
        return {0, 0, height, width};
    }

public:
    Quantization(const Matrix& matrix, Stored element, const ScaleRule& rule, const GridSide* sides,
                 int count)
        : matrix_(matrix),
          element_(element),
          rule_(rule),
          sides_(sides),
          count_(count),
          same_(count == 2 && sides[0].shared_rows == sides[1].shared_rows &&
                sides[0].shared_cols == sides[1].shared_cols) {
        for (int k = 0; k < count; ++k) {
            unit_rows_ = common(unit_rows_, extent(matrix.rows, sides[k].shared_rows), matrix.rows);
            unit_cols_ = common(unit_cols_, extent(matrix.cols, sides[k].shared_cols), matrix.cols);
        }
    }

    void run(int threads) const {
        if (matrix_.rows * matrix_.cols == 0 || unit_rows_ > kRegionElements / unit_cols_) {
            Workspace work = workspace();
            return region(matrix_.all(), matrix_.all(), work, threads);
        }
        const Rectangle size = cached_region(threads);
        const int64_t down = ceil_div(matrix_.rows, size.rows),
                      across = ceil_div(matrix_.cols, size.cols);
        in_parallel(
            down * across, matrix_.rows * matrix_.cols, threads,
            [&](int64_t begin, int64_t end, int) {
                Workspace work = workspace();
                const auto number = [&](int64_t i) {
                    const int64_t row = i / across * size.rows, col = i % across * size.cols;
                    const int64_t high = std::min(size.rows, matrix_.rows - row);
                    return Rectangle{row, col, high, std::min(size.cols, matrix_.cols - col)};
                };
                for (int64_t i = begin; i < end; ++i)
                    region(number(i), number(std::min(i + 1, end - 1)), work, 1);
            });
    }
};

}  // namespace

void grid_quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, Stored element,
                   const ScaleRule& rule, const GridSide* sides, int count, int threads) {
    if (count > 0) Quantization({src, dtype, rows, cols}, element, rule, sides, count).run(threads);
}

void grid_amax(const void* src, Dtype dtype, int64_t rows, int64_t cols, int64_t block_rows,
               int64_t block_cols, float* out, int threads) {
    const Kernels& kernels = active_kernels();
    const Matrix matrix{src, dtype, rows, cols};
    const int64_t across = blocks_in(cols, block_cols);
    const auto count = static_cast<size_t>(blocks_in(rows, block_rows) * across);
    std::vector<float> amaxes(count);
    const GridBlocks blocks{extent(rows, block_rows), extent(cols, block_cols), amaxes.data(),
                            across};
    over_panels(matrix.all(), threads, [&](const Rectangle& at) {
        kernels.grid_amax(matrix.panel(matrix.all(), at), dtype, &blocks, 1, threads > 1);
    });
    std::copy(amaxes.begin(), amaxes.end(), out);
}

void grid_cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* multipliers,
               int64_t block_rows, int64_t block_cols, Stored element, bool turned, uint8_t* out,
               int threads) {
    const Kernels& kernels = active_kernels();
    const Matrix matrix{src, dtype, rows, cols};
    const int64_t down = blocks_in(rows, block_rows), across = blocks_in(cols, block_cols);
    std::vector<float> values(multipliers, multipliers + down * across);
    values.resize(values.size() + kGridLanes);
    const bool positive =
        std::none_of(values.begin(), values.end(), [](float x) { return bits_as<int32_t>(x) < 0; });
    const GridBlocks blocks{extent(rows, block_rows), extent(cols, block_cols), values.data(),
                            across};
    GridSide side{};
    side.turned = turned;
    side.data = out;
    const bool stream = rows * cols >= kStreamBytes;
    over_panels(matrix.all(), threads, [&](const Rectangle& at) {
        const GridOut to = Cast{&side, nullptr, nullptr}.out(matrix, at.row, at.col, stream);
        GridPanel panel = matrix.panel(matrix.all(), at);
        panel.ahead = cols;
        kernels.grid_cast(panel, dtype, blocks, positive, element, to);
    });
}

void grid_decode(const uint8_t* data, Stored element, int64_t rows, int64_t cols,
                 const void* scales, bool e8m0, int64_t block_rows, int64_t block_cols, void* out,
                 Dtype dtype, int threads) {
    const bool of_lines =
        std::min(block_rows, block_cols) == 1 && std::max(block_rows, block_cols) == kMxBlock;
    if (e8m0 && of_lines && element != Stored::int8)
        return mx_decode(data, static_cast<const uint8_t*>(scales), static_cast<Fp8>(element), rows,
                         cols, block_cols == 1, out, dtype, threads);
    const Kernels& kernels = active_kernels();
    GridScales from{};
    from.blocks = {extent(rows, block_rows), extent(cols, block_cols), nullptr,
                   blocks_in(cols, block_cols)};
    if (e8m0)
        from.e8m0 = static_cast<const uint8_t*>(scales);
    else
        from.blocks.values = static_cast<float*>(const_cast<void*>(scales));
    over_panels({0, 0, rows, cols}, threads, [&](const Rectangle& at) {
        const int64_t first = at.row * cols + at.col;
        const GridPanel panel{data + first, cols, at.row, at.col, at.rows, at.cols, 0};
        kernels.grid_decode(panel, element, from,
                            static_cast<uint8_t*>(out) + first * element_bytes(dtype), dtype);
    });
}

}  // namespace ottava
