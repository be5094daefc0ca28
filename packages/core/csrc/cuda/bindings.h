// What the files of bindings share. Operations return once they are queued: none of them lets go of the interpreter.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../addresses.h"

namespace py = pybind11;

namespace ottava::cuda {

void bind_mx(py::module_& m);
void bind_multi(py::module_& m);

}  // namespace ottava::cuda
