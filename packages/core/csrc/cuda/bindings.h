// Helpers that the files of bindings share. Operations return once they are queued, so none of them
// releases the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../addresses.h"
#include "stream.h"

namespace py = pybind11;

namespace ottava::cuda {

// Makes the device of the tensors the current one for a scope. torch sets and restores the device,
// because torch knows which devices are in use: making another one current would allocate memory
// there.
class OnDevice {
#if !defined(OTTAVA_SEQUENTIAL)
    py::object previous_;

public:
    explicit OnDevice(int device) {
        int current = 0;
        check(cudaGetDevice(&current), "the current device is unknown");
        if (current == device) return;
        previous_ = py::module_::import("torch").attr("cuda").attr("_exchange_device")(device);
        // This module has its own copy of the CUDA runtime.
        check(cudaSetDevice(device), "the device cannot be used");
    }
    ~OnDevice() {
        if (!previous_) return;
        try {
            py::module_::import("torch").attr("cuda").attr("_maybe_exchange_device")(previous_);
        } catch (const py::error_already_set&) {
            // A failure cannot be reported here; the next call sets its own device.
        }
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
#else
public:
    explicit OnDevice(int) {}
#endif
};

// The stream that Python names by its address.
inline Stream stream_of(Address stream) {
    return reinterpret_cast<Stream>(stream);
}

void bind_grid(py::module_& m);
void bind_levels(py::module_& m);
void bind_multi(py::module_& m);

}  // namespace ottava::cuda
