// The operations: the work of the threads, and the order in which memory is read. There is no
// arithmetic on elements here.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../numerics.h"
#include "kernels.h"
#include "parallel.h"

namespace ottava {
namespace {

float max_of(Fp8 format) {
    return format == Fp8::e4m3 ? format_max<E4M3>() : format_max<E5M2>();
}

float largest_of(const std::vector<float>& partial) {
    return *std::max_element(partial.begin(), partial.end());
}

std::vector<float> one_for_each(int threads) {
    return std::vector<float>(static_cast<size_t>(std::max(threads, 1)), 0.0f);
}

float amax_of(const void* src, Dtype dtype, int64_t n, int threads) {
    const Kernels& kernels = active_kernels();
    std::vector<float> partial = one_for_each(threads);
    in_parallel(ceil_div(n, kUnit), n, threads, [&](int64_t begin, int64_t end, int thread) {
        const int64_t from = begin * kUnit, to = std::min(end * kUnit, n);
        partial[static_cast<size_t>(thread)] =
            kernels.amax(advance(src, from, dtype), dtype, to - from);
    });
    return largest_of(partial);
}

int64_t saturated_of(const void* src, Dtype dtype, int64_t n, float scale, Fp8 format,
                     int threads) {
    const Kernels& kernels = active_kernels();
    std::atomic<int64_t> count{0};
    in_parallel(ceil_div(n, kUnit), n, threads, [&](int64_t begin, int64_t end, int) {
        const int64_t from = begin * kUnit, to = std::min(end * kUnit, n);
        count +=
            kernels.saturated(advance(src, from, dtype), dtype, to - from, scale, max_of(format));
    });
    return count;
}

// Each thread casts its part backwards, because after an amax, which reads forwards, the caches
// hold the end.
template <class Cast>
float cast_with(Cast run, const void* src, Dtype dtype, int64_t n, float scale, uint8_t* out,
                Fp8 format, int threads) {
    constexpr int64_t block = 16;  // units per call
    std::vector<float> partial = one_for_each(threads);
    const bool stream = n >= kStreamBytes;
    in_parallel(ceil_div(n, kUnit), n, threads, [&](int64_t begin, int64_t end, int thread) {
        float& largest = partial[static_cast<size_t>(thread)];
        for (int64_t last = end; last > begin; last -= block) {
            const int64_t from = std::max(begin, last - block) * kUnit,
                          to = std::min(last * kUnit, n);
            largest = std::max(largest, run(advance(src, from, dtype), dtype, to - from, scale,
                                            out + from, format, stream));
        }
    });
    return largest_of(partial);
}

// Calls body(row, col, rows, cols, thread) for every tile, the last ones first.
template <class Body>
void over_tiles(int64_t rows, int64_t cols, int threads, const Body& body) {
    const int64_t across = ceil_div(cols, kTileCols), down = ceil_div(rows, kTileRows);
    in_parallel(across * down, rows * cols, threads, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t tile = end - 1; tile >= begin; --tile) {
            const int64_t row = tile / across * kTileRows, col = tile % across * kTileCols;
            body(row, col, std::min(kTileRows, rows - row), std::min(kTileCols, cols - col),
                 thread);
        }
    });
}

template <class CastTile>
float cast_transpose_with(CastTile run, const void* src, Dtype dtype, int64_t rows, int64_t cols,
                          float scale, uint8_t* out, uint8_t* out_t, Fp8 format, int threads) {
    std::vector<float> partial = one_for_each(threads);
    const bool stream = rows * cols >= kStreamBytes;
    over_tiles(rows, cols, threads,
               [&](int64_t row, int64_t col, int64_t height, int64_t width, int thread) {
                   Tile tile{};
                   tile.src = advance(src, row * cols + col, dtype);
                   tile.src_stride = cols;
                   tile.rows = height;
                   tile.cols = width;
                   tile.out = out == nullptr ? nullptr : out + row * cols + col;
                   tile.out_stride = cols;
                   tile.out_t = out_t + col * rows + row;
                   tile.out_t_stride = rows;
                   tile.stream = stream;
                   float& largest = partial[static_cast<size_t>(thread)];
                   largest = std::max(largest, run(tile, dtype, scale, format));
               });
    return largest_of(partial);
}

// The decoded values of the positive data; a kernel puts the sign on.
struct DecodeTable {
    alignas(64) uint16_t narrow[128];
    alignas(64) uint32_t wide[128];

    DecodeTable(Fp8 format, Dtype dtype, float scale_inv) {
        if (format == Fp8::e4m3)
            fill<E4M3>(dtype, scale_inv);
        else
            fill<E5M2>(dtype, scale_inv);
    }

private:
    template <class Format>
    void fill(Dtype dtype, float scale_inv) {
        for (int i = 0; i < 128; ++i) {
            const auto code = static_cast<uint8_t>(i);
            if (dtype == Dtype::float32)
                wide[i] = bits_as<uint32_t>(dequantize_element<Format>(code, scale_inv));
            else if (dtype == Dtype::bfloat16)
                narrow[i] = dequantize_bfloat16<Format>(code, scale_inv);
            else
                narrow[i] = dequantize_half<Format>(code, scale_inv);
        }
    }
};

// The table for a scale of one. Small products are decoded in less time than it takes to fill a
// table.
const DecodeTable& bare_table(Fp8 format, Dtype dtype) {
    static const DecodeTable tables[2][3] = {{{Fp8::e4m3, Dtype::float32, 1.0f},
                                              {Fp8::e4m3, Dtype::bfloat16, 1.0f},
                                              {Fp8::e4m3, Dtype::float16, 1.0f}},
                                             {{Fp8::e5m2, Dtype::float32, 1.0f},
                                              {Fp8::e5m2, Dtype::bfloat16, 1.0f},
                                              {Fp8::e5m2, Dtype::float16, 1.0f}}};
    return tables[static_cast<int>(format)][static_cast<int>(dtype)];
}

// Moves up by one row the columns of a history whose entry in `first_row` is not zero, and returns
// the largest value of each column, `first_row` included. NaN counts in `first_row` alone. The
// kernel moves as many rows at a time as make whole vectors.
std::vector<float> move_up(const HistorySlots& t, int64_t length,
                           const std::vector<float>& first_row) {
    constexpr size_t kRows = 16;
    const size_t slots = first_row.size(), width = kRows * slots;
    std::vector<float> largest(width);
    std::vector<uint32_t> moves(width);
    for (size_t i = 0; i < width; i += slots)
        std::copy_n(first_row.data(), slots, largest.data() + i);
    for (size_t i = 0; i < width; ++i) moves[i] = largest[i] != 0.0f ? ~0u : 0u;
    active_kernels().history(t.history, t.slots, (length - 1) * t.slots, moves.data(),
                             largest.data(), static_cast<int64_t>(width));
    for (size_t row = slots; row < width; row += slots)
        for (size_t i = 0; i < slots; ++i) largest[i] = std::max(largest[i], largest[row + i]);
    largest.resize(slots);
    return largest;
}

}  // namespace

void amax(const void* src, Dtype dtype, int64_t n, float* out, int threads) {
    *out = amax_of(src, dtype, n, threads);
}

void scales_from_amax(const float* amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2,
                      float* scale, float* scale_inv) {
    for (int64_t i = 0; i < n; ++i) {
        const Scale result = scale_from_amax(amax[i], fp8_max, epsilon, force_pow_2);
        scale[i] = result.scale;
        scale_inv[i] = result.scale_inv;
    }
}

void quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, float epsilon,
              bool force_pow_2, float* amax_out, float* scale, float* scale_inv, uint8_t* out,
              uint8_t* out_t, Fp8 format, int threads) {
    const float largest = amax_of(src, dtype, rows * cols, threads);
    const Scale result = scale_from_amax(largest, max_of(format), epsilon, force_pow_2);
    if (amax_out != nullptr) *amax_out = largest;
    if (scale != nullptr) *scale = result.scale;
    *scale_inv = result.scale_inv;
    if (out_t != nullptr)
        cast_transpose_with(active_kernels().cast_tile, src, dtype, rows, cols, result.scale, out,
                            out_t, format, threads);
    else if (out != nullptr)
        cast_with(active_kernels().cast, src, dtype, rows * cols, result.scale, out, format,
                  threads);
}

void cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* scale, float* amax,
          int64_t* saturated, float* scale_inv, uint8_t* out, uint8_t* out_t, Fp8 format,
          int threads) {
    const Kernels& kernels = active_kernels();
    const bool observes = amax != nullptr || saturated != nullptr;
    // The scale is read before anything is written, because the state of a slot may be one array.
    const float factor = *scale;
    if (scale_inv != nullptr) *scale_inv = divide(1.0f, factor);
    float largest = 0.0f;
    if (out_t != nullptr)
        largest = cast_transpose_with(observes ? kernels.cast_tile_amax : kernels.cast_tile, src,
                                      dtype, rows, cols, factor, out, out_t, format, threads);
    else if (out != nullptr)
        largest = cast_with(observes ? kernels.cast_amax : kernels.cast, src, dtype, rows * cols,
                            factor, out, format, threads);
    else if (observes)
        largest = amax_of(src, dtype, rows * cols, threads);
    if (amax != nullptr) *amax = std::max(*amax, largest);
    // Rounding keeps the order of products, so no product is larger than that of the amax.
    if (saturated != nullptr && !(std::fabs(multiply(largest, factor)) <= max_of(format)))
        *saturated += saturated_of(src, dtype, rows * cols, factor, format, threads);
}

void update_scales(const HistorySlots* tensors, int64_t count, int64_t length, const float* maxima,
                   bool most_recent, const float* last) {
    for (int64_t i = 0; i < count; ++i) {
        const HistorySlots& t = tensors[i];
        const float* const first = last == nullptr ? t.history : last;
        const std::vector<float> first_row(first, first + t.slots);
        const std::vector<float> largest = move_up(t, length, first_row);
        const std::vector<float>& amaxes = most_recent ? first_row : largest;
        for (int64_t slot = 0; slot < t.slots; ++slot) {
            const auto at = static_cast<size_t>(slot);
            if (first_row[at] == 0.0f) continue;
            t.history[(length - 1) * t.slots + slot] = first_row[at];
            t.history[slot] = 0.0f;
            t.scale[slot] = scale_from_history(amaxes[at], maxima[slot], t.scale[slot]);
        }
        maxima += t.slots;
        if (last != nullptr) last += t.slots;
    }
}

void transpose(const uint8_t* src, int64_t rows, int64_t cols, uint8_t* out, int threads) {
    const Kernels& kernels = active_kernels();
    const bool stream = rows * cols >= kStreamBytes;
    over_tiles(rows, cols, threads,
               [&](int64_t row, int64_t col, int64_t height, int64_t width, int) {
                   Tile tile{};
                   tile.src = src + row * cols + col;
                   tile.src_stride = cols;
                   tile.rows = height;
                   tile.cols = width;
                   tile.out_t = out + col * rows + row;
                   tile.out_t_stride = rows;
                   tile.stream = stream;
                   kernels.transpose_tile(tile);
               });
}

void decode(const uint8_t* src, Fp8 format, int64_t n, const float* scale_inv, void* out,
            Dtype dtype, int threads) {
    const Kernels& kernels = active_kernels();
    const bool stream = n * static_cast<int64_t>(element_bytes(dtype)) >= kStreamBytes;
    const auto with = [&](const DecodeTable& table) {
        in_parallel(ceil_div(n, kUnit), n, threads, [&](int64_t begin, int64_t end, int) {
            const int64_t from = begin * kUnit, count = std::min(end * kUnit, n) - from;
            if (dtype == Dtype::float32)
                kernels.decode32(src + from, count, table.wide, static_cast<uint32_t*>(out) + from,
                                 stream);
            else
                kernels.decode16(src + from, count, table.narrow,
                                 static_cast<uint16_t*>(out) + from, stream);
        });
    };
    if (scale_inv == nullptr)
        with(bare_table(format, dtype));
    else
        with(DecodeTable(format, dtype, *scale_inv));
}

void epilogue32(const float* sums, int64_t rows, int64_t cols, const float* scale_a,
                const float* scale_b, const void* bias, Dtype bias_dtype, void* out, Dtype dtype,
                int threads) {
    const Kernels& kernels = active_kernels();
    const float factor =
        (scale_a == nullptr ? 1.0f : *scale_a) * (scale_b == nullptr ? 1.0f : *scale_b);
    const float* wide = static_cast<const float*>(bias);
    std::vector<float> widened;
    if (bias != nullptr && bias_dtype != Dtype::float32) {
        widened.resize(static_cast<size_t>(cols));
        kernels.round_to(bias, bias_dtype, cols, Dtype::float32, widened.data());
        wide = widened.data();
    }
    in_parallel(rows, rows * cols, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            void* to =
                static_cast<uint8_t*>(out) + static_cast<size_t>(row * cols) * element_bytes(dtype);
            kernels.epilogue(sums + row * cols, cols, factor, wide, to, dtype);
        }
    });
}

void repeat32(const void* row, Dtype dtype, int64_t rows, int64_t cols, float* out, int threads) {
    if (rows * cols == 0) return;
    const size_t bytes = static_cast<size_t>(cols) * sizeof(float);
    if (dtype == Dtype::float32)
        memcpy(out, row, bytes);
    else
        active_kernels().round_to(row, dtype, cols, Dtype::float32, out);
    in_parallel(rows - 1, rows * cols, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) memcpy(out + (i + 1) * cols, out, bytes);
    });
}

void mx_scales_from_amax(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents,
                         int threads) {
    const Kernels& kernels = active_kernels();
    in_parallel(ceil_div(n, kUnit), n, threads, [&](int64_t begin, int64_t end, int) {
        const int64_t from = begin * kUnit, to = std::min(end * kUnit, n);
        kernels.mx_scales(amax + from, to - from, format, floor, exponents + from);
    });
}

void mx_decode(const uint8_t* data, const uint8_t* scales, Fp8 format, int64_t rows, int64_t cols,
               bool columnwise, void* out, Dtype dtype, int threads) {
    const Kernels& kernels = active_kernels();
    const bool stream = rows * cols * static_cast<int64_t>(element_bytes(dtype)) >= kStreamBytes;
    const DecodeTable& table = bare_table(format, Dtype::bfloat16);
    in_parallel(rows, rows * cols, threads, [&](int64_t begin, int64_t end, int) {
        kernels.mx_decode({data, scales, cols, begin, end, columnwise}, format, table.narrow, out,
                          dtype, stream);
    });
}

}  // namespace ottava
