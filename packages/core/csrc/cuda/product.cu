// What follows a product: its last step, and its exact lines.
#include "epilogue.h"
#include "launch.h"
#include "mx_lines.h"
#include "operations.h"

namespace ottava::cuda {
namespace {

template <class Source, class Target>
void finish_as(const void* acc, int64_t rows, int64_t cols, const Finish& finish, void* out, Stream stream) {
    const Grid grid(rows, cols, Strip::kRows, Strip::kCols);
    const bool groups = cols % kGroup == 0;
    const Epilogue<Source, Target> kernel{acc,
                                          rows,
                                          cols,
                                          static_cast<uint32_t>(grid.across),
                                          groups && aligned(acc, 16) && aligned(out, 16),
                                          {finish.scale_a, finish.scale_b},
                                          {finish.bias, finish.bias_dtype, aligned(finish.bias, 16)},
                                          out};
    launch(kernel, grid.count, stream);
}

Matrix64 matrix_of(const MxOperand& operand, int64_t outer, int64_t inner, bool left) {
    const bool upright = left != operand.transposed;  // a line of the reduced dimension is a row as stored
    return {operand.values,     operand.scales,          operand.format,          operand.dtype, operand.columnwise,
            operand.transposed, upright ? outer : inner, upright ? inner : outer};
}

}  // namespace

void finish_bfloat16(uint16_t* acc, int64_t rows, int64_t cols, const Finish& finish, Stream stream) {
    finish_as<BFloat16, BFloat16>(acc, rows, cols, finish, acc, stream);
}

void finish_float32(const float* acc, int64_t rows, int64_t cols, const Finish& finish, void* out, Dtype dtype,
                    Stream stream) {
    with_source(dtype, [&](auto target) { finish_as<Float32, decltype(target)>(acc, rows, cols, finish, out, stream); });
}

void mx_exact_lines(void* out, Dtype dtype, int64_t rows, int64_t cols, int64_t inner, const MxOperand& a,
                    const MxOperand& b, const Finish& finish, const int32_t* flags, Stream stream) {
    if (rows == 0 || cols == 0) return;
    const MxExactLines kernel{matrix_of(a, rows, inner, true),
                              matrix_of(b, cols, inner, false),
                              rows,
                              cols,
                              inner,
                              finish.scale_a,
                              finish.scale_b,
                              finish.bias,
                              finish.bias_dtype,
                              flags,
                              out,
                              dtype};
    const int64_t lines = rows > cols ? rows : cols;
    launch(kernel, lines < MxExactLines::kMaxBlocks ? lines : MxExactLines::kMaxBlocks, stream);
}

}  // namespace ottava::cuda
