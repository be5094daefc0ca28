#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace ottava {

// Adds the functions for layouts with small elements, two levels of scales, rotation or choices.
void bind_levels(pybind11::module_& m);

}  // namespace ottava
