// MX blocks: their scales, and their quantization.
#include "mx.h"

#include <type_traits>

#include "launch.h"
#include "operations.h"
#include "strip.h"

namespace ottava::cuda {

void mx_scales_from_amax(const float* amax, int64_t n, Fp8 format, bool floor, uint8_t* exponents,
                         Stream stream) {
    with_format(format, [&](auto element) {
        typedef MxScaleOfAmax<decltype(element)> Kernel;
        const bool wide = aligned(amax, 16) && aligned(exponents, 8);
        launch(Kernel{amax, n, wide, floor, exponents}, ceil_div(n, Kernel::kChunk), stream);
    });
}

void mx_quantize(const void* src, Dtype dtype, int64_t rows, int64_t cols, Fp8 format, bool square,
                 bool floor, const MxData& by_row, const MxData& by_column, Stream stream) {
    const bool groups = cols % kGroup == 0;
    const bool wide =
        groups && aligned(src, 16) && aligned(by_row.data, 8) && aligned(by_column.data, 8);
    const MxResult row{by_row.data, by_row.scales,
                       aligned(by_row.scales, 16) && ceil_div(cols, kMxBlock) % 16 == 0};
    const MxResult column{by_column.data, by_column.scales, aligned(by_column.scales, 8) && groups};
    with_source(dtype, [&](auto source) {
        with_format(format, [&](auto element) {
            const auto run = [&](auto rowwise, auto columnwise) {
                typedef MxQuantize<decltype(source), decltype(element), rowwise.value,
                                   columnwise.value>
                    Kernel;
                const Grid grid(rows, cols, Kernel::kRows, Kernel::kCols);
                const uint32_t across = static_cast<uint32_t>(grid.across);
                launch(Kernel{src, wide, square, floor, rows, cols, across, row, column},
                       grid.count, stream);
            };
            if (by_column.data == nullptr)
                run(std::true_type{}, std::false_type{});
            else if (by_row.data == nullptr)
                run(std::false_type{}, std::true_type{});
            else
                run(std::true_type{}, std::true_type{});
        });
    });
}

}  // namespace ottava::cuda
