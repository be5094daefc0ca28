// The last step of a product.
#include "epilogue.h"
#include "launch.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

template <class Target>
void finish_as(const float* acc, int64_t rows, int64_t cols, const Finish& finish, void* out,
               Stream stream) {
    const Grid grid(rows, cols, Strip::kRows, Strip::kCols);
    const bool groups = cols % kGroup == 0;
    const Epilogue<Target> kernel{acc,
                                  rows,
                                  cols,
                                  static_cast<uint32_t>(grid.across),
                                  groups && aligned(acc, 16) && aligned(out, 16),
                                  {finish.scale_a, finish.scale_b},
                                  {finish.bias, finish.bias_dtype, aligned(finish.bias, 16)},
                                  out};
    launch(kernel, grid.count, stream);
}

}  // namespace

void finish_float32(const float* acc, int64_t rows, int64_t cols, const Finish& finish, void* out,
                    Dtype dtype, Stream stream) {
    with_source(dtype, [&](auto target) {
        finish_as<decltype(target)>(acc, rows, cols, finish, out, stream);
    });
}

}  // namespace ottava::cuda
