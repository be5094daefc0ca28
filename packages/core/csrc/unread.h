// Rows of an operand that have no tensors yet: a product reads their memory, and few others ask for
// them. Everything here is called with the GIL held, but for the release of tensors' memory.
#pragma once

#include <Python.h>

#include <cstdint>

namespace ottava {

// Data and scales, which tensors share; freed with the last owner.
struct Piece;

// An object of Python with `shape`, that of the data, `is_cpu`, which is true, and `tensors()`:
// data and scales.
struct Unread {
    PyObject_HEAD Piece* piece;
    uint8_t* data;     // [rows, cols]
    void* scales;      // [scale_rows, scale_cols], float32 or bytes
    int64_t shape[4];  // of both
    bool e8m0;
};

// Null with a Python error.
Unread* make_unread(int64_t rows, int64_t cols, int64_t scale_rows, int64_t scale_cols, bool e8m0);
// Null, without an error, if the object is something else.
Unread* as_unread(PyObject* object);
// Makes the type, once; false with a Python error.
bool ready_unread();

}  // namespace ottava
