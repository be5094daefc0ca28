// amax, cast and quantization along rows.
#include "cast.h"

#include <algorithm>

#include "cast_transpose.h"
#include "launch.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

static_assert(kScratchFloats >= kMaxPartials, "room for all partial amaxes");

// Returns the number of partial amaxes.
int partial_amaxes(const void* src, Dtype dtype, int64_t n, float* scratch, Stream stream) {
    int blocks = 0;
    with_source(dtype, [&](auto source) {
        typedef PartialAmax<decltype(source)> Kernel;
        blocks = Kernel::blocks_for(n);
        launch(Kernel{src, n, aligned(src, 16), scratch}, blocks, stream);
    });
    return blocks;
}

struct ScaleOfAmax {
    static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1;
    struct Shared {};
    const float* amax;
    int64_t count;
    float fp8_max, epsilon;
    bool force_pow_2;
    float* scale;
    float* scale_inv;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared&) const {
        const int64_t i = thread.block() * kThreads + thread.index();
        if (i >= count) return;
        const Scale result = scale_from_amax(amax[i], fp8_max, epsilon, force_pow_2);
        scale[i] = result.scale;
        scale_inv[i] = result.scale_inv;
    }
};

}  // namespace

// Chooses the kernel by the results that are requested.
template <class Scaling>
void cast_with(const void* src, Dtype dtype, int64_t rows, int64_t cols, const Scaling& scaling,
               uint8_t* out, uint8_t* out_t, Fp8 format, Stream stream) {
    const int64_t n = rows * cols;
    with_source(dtype, [&](auto source) {
        with_format(format, [&](auto target) {
            typedef decltype(source) Source;
            typedef decltype(target) Format;
            if (out_t == nullptr) {
                typedef Cast<Source, Format, Scaling> Kernel;
                const bool wide = aligned(src, 16) && aligned(out, 8);
                launch(Kernel{src, n, wide, out, scaling}, Kernel::blocks_for(n), stream);
                return;
            }
            typedef CastTranspose<Source, Format, Scaling> Kernel;
            const Tiles tiles(rows, cols);
            const bool wide = aligned(src, 16) && aligned(out, 8) && cols % kGroup == 0;
            const TurnedOut turned{out_t, rows, cols, aligned(out_t, 16) && rows % 16 == 0};
            const Kernel kernel{
                {src, wide, rows, cols, std::max<int64_t>(tiles.across, 1)}, out, turned, scaling};
            // There is at least one block, because a block writes the scale.
            launch(kernel, tiles.count > 0 ? tiles.count : 1, stream);
        });
    });
}

void amax(const void* src, Dtype dtype, int64_t n, float* scratch, float* out, Stream stream) {
    const int parts = partial_amaxes(src, dtype, n, scratch, stream);
    launch(FinishAmax{scratch, parts, out}, 1, stream);
}

void scales_from_amax(const float* amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2,
                      float* scale, float* scale_inv, Stream stream) {
    const ScaleOfAmax kernel{amax, n, fp8_max, epsilon, force_pow_2, scale, scale_inv};
    launch(kernel, ceil_div(n, ScaleOfAmax::kThreads), stream);
}

void cast(const void* src, Dtype dtype, int64_t rows, int64_t cols, const float* scale,
          const Observed& observed, uint8_t* out, uint8_t* out_t, Fp8 format, Stream stream) {
    const KnownScale scaling{scale, observed.amax, observed.saturated, observed.scale_inv};
    cast_with(src, dtype, rows, cols, scaling, out, out_t, format, stream);
}

void quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, float epsilon,
              bool force_pow_2, float* scratch, float* amax, float* scale, float* scale_inv,
              uint8_t* out, uint8_t* out_t, Fp8 format, Stream stream) {
    const int parts = partial_amaxes(src, dtype, rows * cols, scratch, stream);
    const CurrentScale scaling{scratch, parts, epsilon, force_pow_2, amax, scale, scale_inv};
    if (out == nullptr && out_t == nullptr)
        cast_with(src, dtype, 0, 0, scaling, nullptr, nullptr, format, stream);
    else
        cast_with(src, dtype, rows, cols, scaling, out, out_t, format, stream);
}

}  // namespace ottava::cuda
