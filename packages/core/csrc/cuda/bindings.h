// What the files of bindings share. Operations return once they are queued: none of them lets go of
// the interpreter.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../addresses.h"
#include "stream.h"

namespace py = pybind11;

namespace ottava::cuda {

// The device of the tensors is the current one inside, whatever it is outside. torch changes it and
// changes it back: it keeps count of the devices that are in use at all, and a look at another one
// would take memory there.
class OnDevice {
#if !defined(OTTAVA_SEQUENTIAL)
    py::object previous_;

public:
    explicit OnDevice(int device) {
        int current = 0;
        check(cudaGetDevice(&current), "the current device is unknown");
        if (current == device) return;
        previous_ = py::module_::import("torch").attr("cuda").attr("_exchange_device")(device);
        // This module has a runtime of its own.
        check(cudaSetDevice(device), "the device cannot be used");
    }
    ~OnDevice() {
        if (!previous_) return;
        try {
            py::module_::import("torch").attr("cuda").attr("_maybe_exchange_device")(previous_);
        } catch (const py::error_already_set&) {
            // Nothing to be done about it on the way out; the next call sets its own.
        }
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
#else
public:
    explicit OnDevice(int) {}
#endif
};

void bind_grid(py::module_& m);
void bind_multi(py::module_& m);

}  // namespace ottava::cuda
