// Operations on grids of scales: quantization and decoding.
#include "grid.h"

#include <algorithm>
#include <stdexcept>

#include "grid_decode.h"
#include "launch.h"
#include "mx_scales.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

int64_t count_of(int64_t size, int64_t block) {
    return block == 0 ? 1 : ceil_div(size, block);
}

// Calls body(blocks) with the blocks of a side. Blocks along columns are those along rows with rows
// and columns exchanged.
template <class Body>
void with_blocks(const GridSide& side, const Body& body) {
    const int64_t narrow = std::min(side.block_rows, side.block_cols),
                  wide = std::max(side.block_rows, side.block_cols);
    if (narrow == kTile && wide == kTile) return body(SquareBlocks{});
    if (narrow == 1 && wide == kTile) return body(LineBlocks{});
    if (narrow == 0 && wide == 1) return body(WholeLines{});
    throw std::invalid_argument("the CUDA kernels have no such blocks");
}

GridResult result_of(const GridSide& side, int64_t rows, int64_t cols, const float* amaxes) {
    const int64_t down = count_of(rows, side.block_rows), across = count_of(cols, side.block_cols);
    return {side.data, static_cast<float*>(side.scales), side.turned ? 1 : across,
            side.turned ? down : 1, amaxes};
}

MxData mx_data_of(const GridSide& side) {
    return {side.data, static_cast<uint8_t*>(side.scales)};
}

// The exponent of a block's size. A block of all rows gets an exponent beyond the bits of any
// index.
int shift_of(int64_t block) {
    int shift = 0;
    while (block != int64_t{1} << shift)
        if (++shift == 62) return shift;
    return shift;
}

}  // namespace

void grid_quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, Fp8 format,
                   const ScaleRule& rule, const GridSide& by_row, const GridSide& by_column,
                   float* scratch, Stream stream) {
    const GridSide& any = by_row.data == nullptr ? by_column : by_row;
    if (any.data == nullptr || rows * cols == 0) return;
    if (rule.e8m0) {
        const bool square = any.shared_rows == any.shared_cols;
        return mx_quantize(src, dtype, rows, cols, format, square, rule.floor, mx_data_of(by_row),
                           mx_data_of(by_column), stream);
    }
    const Tiles tiles(rows, cols);
    const bool groups = cols % kGroup == 0 && aligned(src, 16);
    const bool wide =
        groups && aligned(by_row.data, 8) && (by_column.turned || aligned(by_column.data, 8));
    const TileSource from{src, wide, rows, cols, tiles.across};
    const TurnedOut turned{by_column.turned ? by_column.data : nullptr, rows, cols,
                           aligned(by_column.data, 16) && rows % 16 == 0};
    float* const amaxes[] = {by_row.data == nullptr ? nullptr : scratch,
                             by_column.data == nullptr ? nullptr : scratch + rows};
    with_source(dtype, [&](auto source) {
        typedef decltype(source) Source;
        with_blocks(any, [&](auto blocks) {
            typedef decltype(blocks) Blocks;
            if (Blocks::whole)
                launch(LineAmaxes<Source>{from, amaxes[0], amaxes[1]}, tiles.count, stream);
            with_format(format, [&](auto element) {
                const GridQuantize<Source, decltype(element), Blocks> kernel{
                    from, rule, result_of(by_row, rows, cols, amaxes[0]),
                    result_of(by_column, rows, cols, amaxes[1]), turned};
                launch(kernel, tiles.count, stream);
            });
        });
    });
}

void grid_decode(const uint8_t* data, Fp8 format, int64_t rows, int64_t cols, const void* scales,
                 bool e8m0, int64_t block_rows, int64_t block_cols, void* out, Dtype dtype,
                 Stream stream) {
    const Grid grid(rows, cols, Strip::kRows, Strip::kCols);
    const bool groups = cols % kGroup == 0;
    with_source(dtype, [&](auto target) {
        with_format(format, [&](auto element) {
            const auto run = [&](auto scale) {
                typedef decltype(scale) Scale;
                const DecodeScales<Scale> from{static_cast<const typename Scale::Stored*>(scales),
                                               count_of(cols, block_cols), shift_of(block_rows),
                                               shift_of(block_cols),
                                               groups && aligned(scales, Scale::alignment)};
                launch(
                    GridDecode<decltype(element), decltype(target), Scale>{
                        data, from, rows, cols, static_cast<uint32_t>(grid.across), out,
                        groups && aligned(data, 8) && aligned(out, 16)},
                    grid.count, stream);
            };
            if (e8m0)
                run(PowerScale{});
            else
                run(FloatScale{});
        });
    });
}

}  // namespace ottava::cuda
