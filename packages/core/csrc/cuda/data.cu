// Operations on data: the transpose and the decoding.
#include "cast_transpose.h"
#include "decode.h"
#include "launch.h"
#include "operations.h"

namespace ottava::cuda {

void transpose(const uint8_t* src, int64_t rows, int64_t cols, uint8_t* out, Stream stream) {
    const Tiles tiles(rows, cols);
    const bool wide = aligned(src, 8) && cols % kGroup == 0;
    launch(
        Transpose{src, wide, {out, rows, cols, aligned(out, 16) && rows % 16 == 0}, tiles.across},
        tiles.count, stream);
}

void decode(const uint8_t* src, Fp8 format, int64_t n, const float* scale_inv, void* out,
            Dtype dtype, Stream stream) {
    with_source(dtype, [&](auto target) {
        with_format(format, [&](auto element) {
            typedef Decode<decltype(element), decltype(target)> Kernel;
            const bool wide = aligned(src, 8) && aligned(out, 16);
            launch(Kernel{src, n, scale_inv, out, wide}, ceil_div(n, Kernel::kChunk), stream);
        });
    });
}

}  // namespace ottava::cuda
