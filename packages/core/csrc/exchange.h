// Torch's tensors without libtorch: read and made through DLPack's exchange functions, a table of C
// functions that `torch.Tensor` carries. Everything here is called with the GIL held.
#pragma once

#include <Python.h>

#include <cstdint>

#include "dtypes.h"

namespace ottava {

// The part of DLPack's ABI, version 1, that is used.
namespace dlpack {

struct Device {
    int32_t type, id;
};
struct Type {
    uint8_t code, bits;
    uint16_t lanes;
};
struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    Type type;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct Version {
    uint32_t major, minor;
};
struct Managed {
    Version version;
    void* context;
    void (*free)(Managed* self);
    uint64_t flags;
    Tensor tensor;
};
struct Exchange {
    Version version;
    void* previous;
    void* allocate;  // not used: a tensor that owns memory of ours is made in about half the time
    int (*managed_from)(void* object, Managed** out);
    int (*to_object)(Managed* tensor, void** out);
    int (*view)(void* object, Tensor* out);
    int (*stream)(int32_t type, int32_t id, void** out);
};

constexpr int32_t kCpu = 1;
constexpr Type kInt64{0, 64, 1}, kUint8{1, 8, 1}, kFloat32{2, 32, 1}, kFloat16{2, 16, 1},
    kBfloat16{4, 16, 1};

inline bool operator==(const Type& a, const Type& b) {
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

}  // namespace dlpack

// Owns a reference.
class Owned {
public:
    explicit Owned(PyObject* object = nullptr) : object_(object) {}
    ~Owned() { Py_XDECREF(object_); }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    PyObject* get() const { return object_; }
    PyObject* release() {
        PyObject* given = object_;
        object_ = nullptr;
        return given;
    }
    void reset(PyObject* object) {
        Py_XDECREF(object_);
        object_ = object;
    }

private:
    PyObject* object_;
};

// Where the elements of a tensor lie.
struct View : dlpack::Tensor {
    int64_t size;  // how many elements

    bool is(const dlpack::Type& other) const { return type == other; }
    bool contiguous() const;
    // Of [*leading, K].
    int64_t cols() const { return ndim == 0 ? 1 : shape[ndim - 1]; }
    int64_t rows() const { return cols() == 0 ? 0 : size / cols(); }
};

// What Python hands over, once: see `connect` in operands.cpp.
struct Torch {
    const dlpack::Exchange* exchange = nullptr;
    PyObject *tensor, *parameter;                                    // the types that are plain
    PyObject *modes, *functions, *transforms, *tracing, *profiling;  // who would see an operator
    PyObject *grad_enabled, *threads, *autocast;
    PyObject* module;                                            // torch, which has the product
    PyObject *is_neg, *contiguous, *requires_grad, *mm, *addmm;  // names of methods and attributes
};
extern Torch torch;

// Whether anything that is active would see an operator. Python errors count as yes, and are
// cleared.
bool observed();

// The memory of a tensor of a CPU; nobody notices. False for every other: Python answers for it.
bool view_of(PyObject* object, View& out);
// Whether the memory has the values, and no gradient is asked for.
bool settled(PyObject* object, const View& view, bool gradients);
bool gradients_enabled();
// Whether torch.autocast is on, for any device.
bool autocast_enabled();
int torch_threads();
bool dtype_of(const View& view, Dtype& out);
dlpack::Type type_of(Dtype dtype);

// A new tensor on the CPU; null with a Python error.
PyObject* allocate(const int64_t* shape, int32_t ndim, const dlpack::Type& type, View& out);

}  // namespace ottava
