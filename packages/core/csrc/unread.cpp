#include "unread.h"

#include <atomic>
#include <cstdlib>
#include <new>

#include "exchange.h"

namespace ottava {

struct Piece {
    std::atomic<int> owners{1};

    void release() {
        if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) free(this);
    }
};

namespace {

constexpr size_t kLine = 64;  // bytes of a cache line, to which data and scales are aligned

PyTypeObject* type = nullptr;

uintptr_t next_line(uintptr_t address) {
    return (address + kLine - 1) / kLine * kLine;
}

// A tensor of the piece's memory, which it owns with the others.
PyObject* tensor_of(Piece* piece, void* data, const int64_t* shape, const dlpack::Type& of) {
    auto* const managed =
        static_cast<dlpack::Managed*>(malloc(sizeof(dlpack::Managed) + 4 * sizeof(int64_t)));
    if (managed == nullptr) return PyErr_NoMemory();
    auto* const sizes = reinterpret_cast<int64_t*>(managed + 1);
    sizes[0] = shape[0], sizes[1] = sizes[2] = shape[1], sizes[3] = 1;
    const auto release = [](dlpack::Managed* self) {
        static_cast<Piece*>(self->context)->release();
        free(self);
    };
    const dlpack::Tensor tensor{data, {dlpack::kCpu, 0}, 2, of, sizes, sizes + 2, 0};
    *managed = {torch.exchange->version, piece, release, 0, tensor};
    piece->owners.fetch_add(1, std::memory_order_relaxed);
    void* object = nullptr;  // owns the memory, even where making it fails
    return torch.exchange->to_object(managed, &object) == 0 ? static_cast<PyObject*>(object)
                                                            : nullptr;
}

Unread& of(PyObject* self) {
    return *reinterpret_cast<Unread*>(self);
}

PyObject* tensors(PyObject* self, PyObject*) {
    const Unread& rows = of(self);
    const Owned data(tensor_of(rows.piece, rows.data, rows.shape, dlpack::kUint8));
    if (data.get() == nullptr) return nullptr;
    const dlpack::Type& scale = rows.e8m0 ? dlpack::kUint8 : dlpack::kFloat32;
    const Owned scales(tensor_of(rows.piece, rows.scales, rows.shape + 2, scale));
    return scales.get() == nullptr ? nullptr : PyTuple_Pack(2, data.get(), scales.get());
}

PyObject* shape(PyObject* self, void*) {
    const int64_t* sizes = of(self).shape;
    return Py_BuildValue("LL", static_cast<long long>(sizes[0]), static_cast<long long>(sizes[1]));
}

PyObject* is_cpu(PyObject*, void*) {
    Py_RETURN_TRUE;
}

void forget(PyObject* self) {
    PyTypeObject* const own = Py_TYPE(self);
    of(self).piece->release();
    PyObject_Free(self);
    Py_DECREF(own);
}

}  // namespace

Unread* make_unread(int64_t rows, int64_t cols, int64_t scale_rows, int64_t scale_cols, bool e8m0) {
    const auto data = static_cast<size_t>(rows * cols);
    const size_t scales = static_cast<size_t>(scale_rows * scale_cols) * (e8m0 ? 1 : sizeof(float));
    void* const memory = malloc(sizeof(Piece) + data + scales + 2 * kLine);
    Unread* const made = memory == nullptr ? nullptr : PyObject_New(Unread, type);
    if (made == nullptr) {
        free(memory);
        PyErr_NoMemory();
        return nullptr;
    }
    made->piece = new (memory) Piece;
    const uintptr_t first = next_line(reinterpret_cast<uintptr_t>(memory) + sizeof(Piece));
    made->data = reinterpret_cast<uint8_t*>(first);
    made->scales = reinterpret_cast<void*>(next_line(first + data));
    made->shape[0] = rows, made->shape[1] = cols, made->shape[2] = scale_rows,
    made->shape[3] = scale_cols;
    made->e8m0 = e8m0;
    return made;
}

Unread* as_unread(PyObject* object) {
    return Py_TYPE(object) == type ? &of(object) : nullptr;
}

bool ready_unread() {
    static PyMethodDef methods[] = {{"tensors", tensors, METH_NOARGS, nullptr}, {}};
    static PyGetSetDef attributes[] = {{"shape", shape, nullptr, nullptr, nullptr},
                                       {"is_cpu", is_cpu, nullptr, nullptr, nullptr},
                                       {}};
    static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(forget)},
                                  {Py_tp_methods, methods},
                                  {Py_tp_getset, attributes},
                                  {}};
    static PyType_Spec spec{"ottava._cpu.Unread", sizeof(Unread), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    return type != nullptr;
}

}  // namespace ottava
