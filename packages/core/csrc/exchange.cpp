#include "exchange.h"

#include <cstdlib>
#include <initializer_list>

namespace ottava {

Torch torch;

namespace {

// The truth of what a function without arguments says; -1 with an error.
int says(PyObject* function) {
    const Owned answer(PyObject_CallNoArgs(function));
    return answer.get() == nullptr ? -1 : PyObject_IsTrue(answer.get());
}

constexpr uintptr_t kLine = 64;  // bytes of a cache line, to which torch aligns data, too

bool fails() {
    PyErr_Clear();
    return false;
}

bool complete(View& view) {
    view.size = 1;
    for (int32_t dim = 0; dim < view.ndim; ++dim) view.size *= view.shape[dim];
    view.data = static_cast<char*>(view.data) + view.byte_offset;
    return view.device.type == dlpack::kCpu && (view.data != nullptr || view.size == 0);
}

}  // namespace

bool View::contiguous() const {
    if (strides == nullptr || size == 0) return true;
    int64_t expected = 1;
    for (int32_t dim = ndim - 1; dim >= 0; --dim) {
        if (shape[dim] != 1 && strides[dim] != expected) return false;
        expected *= shape[dim];
    }
    return true;
}

bool observed() {
    for (PyObject* ask : {torch.modes, torch.functions, torch.profiling})
        if (says(ask) != 0) return PyErr_Clear(), true;
    for (PyObject* ask : {torch.transforms, torch.tracing}) {
        const Owned found(PyObject_CallNoArgs(ask));
        if (found.get() != Py_None) return PyErr_Clear(), true;
    }
    return false;
}

bool gradients_enabled() {
    const int enabled = says(torch.grad_enabled);
    return enabled < 0 ? !fails() : enabled != 0;
}

bool autocast_enabled() {
    const int enabled = says(torch.autocast);
    return enabled < 0 ? !fails() : enabled != 0;
}

int torch_threads() {
    const Owned count(PyObject_CallNoArgs(torch.threads));
    const long threads = count.get() == nullptr ? -1 : PyLong_AsLong(count.get());
    return threads < 1 ? (PyErr_Clear(), 1) : static_cast<int>(threads);
}

bool view_of(PyObject* object, View& out) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != torch.tensor && type != torch.parameter) return false;
    return torch.exchange->view(object, &out) == 0 ? complete(out) : fails();
}

bool settled(PyObject* object, const View& view, bool gradients) {
    // A negation that is still to be done, of complex parts, is seen by torch's operators alone.
    if (view.type.code >= dlpack::kFloat32.code) {
        const Owned negative(PyObject_CallMethodNoArgs(object, torch.is_neg));
        if (negative.get() != Py_False) return fails();
    }
    if (gradients) {
        const Owned asked(PyObject_GetAttr(object, torch.requires_grad));
        if (asked.get() != Py_False) return fails();
    }
    return true;
}

bool dtype_of(const View& view, Dtype& out) {
    if (view.is(dlpack::kFloat32)) return out = Dtype::float32, true;
    if (view.is(dlpack::kBfloat16)) return out = Dtype::bfloat16, true;
    if (view.is(dlpack::kFloat16)) return out = Dtype::float16, true;
    return false;
}

dlpack::Type type_of(Dtype dtype) {
    if (dtype == Dtype::float32) return dlpack::kFloat32;
    return dtype == Dtype::bfloat16 ? dlpack::kBfloat16 : dlpack::kFloat16;
}

PyObject* allocate(const int64_t* shape, int32_t ndim, const dlpack::Type& type, View& out) {
    int64_t count = 1;
    for (int32_t dim = 0; dim < ndim; ++dim) count *= shape[dim];
    // One piece of memory: the header, shape and strides, and the data from the next cache line on.
    const size_t head =
        sizeof(dlpack::Managed) + 2 * sizeof(int64_t) * static_cast<size_t>(ndim) + kLine;
    void* const piece = malloc(head + static_cast<size_t>(count) * (type.bits / 8));
    if (piece == nullptr) return PyErr_NoMemory();
    auto* const managed = static_cast<dlpack::Managed*>(piece);
    auto* const sizes = reinterpret_cast<int64_t*>(managed + 1);
    for (int64_t dim = ndim - 1, stride = 1; dim >= 0; stride *= shape[dim--]) {
        sizes[dim] = shape[dim];
        sizes[ndim + dim] = stride;
    }
    const auto free_from = reinterpret_cast<uintptr_t>(sizes + 2 * ndim);
    void* const data = reinterpret_cast<void*>((free_from + kLine - 1) / kLine * kLine);
    const dlpack::Tensor tensor{data, {dlpack::kCpu, 0}, ndim, type, sizes, sizes + ndim, 0};
    *managed = {torch.exchange->version, nullptr, [](dlpack::Managed* self) { free(self); }, 0,
                tensor};
    static_cast<dlpack::Tensor&>(out) = tensor;
    out.size = count;
    void* object = nullptr;  // owns the memory, even where making it fails
    return torch.exchange->to_object(managed, &object) == 0 ? static_cast<PyObject*>(object)
                                                            : nullptr;
}

}  // namespace ottava
