// Quantizations of operands of layers that take torch's tensors; kernels.for_layers is the
// interface to use.
#pragma once

#include <pybind11/pybind11.h>

namespace ottava {

void bind_operands(pybind11::module_& m);

}  // namespace ottava
