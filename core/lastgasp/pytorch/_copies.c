/* Copies of a rank's random state and of its buffers, taken at each boundary of a step (rng.py, buffers.py), and
 * comparisons that tell what has changed since the last one (compiled.py, `Seen` of buffers.py).
 *
 * Why C: a step has up to three captures, and each call of torch or ctypes from Python costs as much as the copy
 * itself. Where no compiler was there at install the same is done in Python; both pass the same tests.
 *
 * Everything here runs under the GIL. Addresses come from Python, which has checked at start what stands there.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define LAYOUT 1 /* rng.py: _VERSION */
#define INTERFACE 3 /* of the functions; compiled.py */
#define TWISTER 2500
#define PYTHON_AT 80
#define NUMPY_AT (PYTHON_AT + 2504)
#define TORCH_AT (NUMPY_AT + 4096)
#define TORCH_STATE 5056 /* of get_state */
#define TORCH_TAIL (24 + 624 * 8)
#define TORCH_NORMALS 2520 /* sizeof(at::mt19937) */
enum { KIND = 1, LENGTH = 2, HAS_PYTHON = 6, HAS_NUMPY = 7, GAUSS_PYTHON = 8, GAUSS_NUMPY = 9 };
enum { PYTHON = 1, NUMPY = 2, TORCH = 4 };

typedef struct {
    PyObject *data_ptr, *numel, *gauss_next, *bit_generator;
} Names;

/* The address of a tensor's data; NULL with an exception set, or, where it has none, without. */
static void *
data_of(PyObject *tensor, PyObject *data_ptr)
{
    PyObject *number = PyObject_CallMethodNoArgs(tensor, data_ptr);
    if (number == NULL)
        return NULL;
    void *address = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return address;
}

/* -------------------------------------------------------------------------------------------------- Random */

typedef struct {
    PyObject_HEAD
    Names names;
    Py_buffer view;
    PyObject *python;             /* random._inst */
    const char *python_words;     /* NULL: Python asks for it */
    PyObject *numpy, *generator;  /* the RandomState, and the bit generator that the address belongs to */
    const char *numpy_words;      /* NULL: Python asks for it */
    const int *has_gauss;
    const double *gauss;
    PyObject *torch;              /* Generator.get_state, bound */
    Py_ssize_t torch_bytes;
    const char *engine;           /* torch's at::mt19937, see write_torch; NULL: its getter is called */
} Random;

static bool
capture_python(const Random *self)
{
    if (self->python_words == NULL)
        return false;
    int64_t *ints = self->view.buf;
    double *floats = self->view.buf;
    PyObject *next = PyObject_GetAttr(self->python, self->names.gauss_next);
    if (next == NULL)
        return false;
    bool there = next != Py_None;
    double value = there ? PyFloat_AsDouble(next) : 0.0;
    Py_DECREF(next);
    if (value == -1.0 && PyErr_Occurred() != NULL)
        return false;
    memcpy((char *)self->view.buf + PYTHON_AT, self->python_words, TWISTER);
    ints[HAS_PYTHON] = there;
    if (there)
        floats[GAUSS_PYTHON] = value;
    return true;
}

static bool
capture_numpy(const Random *self)
{
    if (self->numpy_words == NULL)
        return false;
    PyObject *generator = PyObject_GetAttr(self->numpy, self->names.bit_generator);
    Py_XDECREF(generator); /* the RandomState holds it */
    if (generator == NULL || generator != self->generator)
        return false;
    int64_t *ints = self->view.buf;
    memcpy((char *)self->view.buf + NUMPY_AT, self->numpy_words, TWISTER);
    ints[KIND] = 0;
    ints[LENGTH] = TWISTER;
    ints[HAS_NUMPY] = *self->has_gauss;
    ((double *)self->view.buf)[GAUSS_NUMPY] = *self->gauss;
    return true;
}

/* What get_state would return, from the memory of at::CPUGeneratorImpl: at::mt19937 (seed, left, seeded, next, words)
 * and two optional normals behind it. rng.py has compared both for generators in several states (_TorchMemory).
 * torch's getter takes a lock: where another thread draws in this moment, the order of draws is chance anyway. */
static void
write_torch(char *restrict state, const char *restrict engine)
{
    const char *normals = engine + TORCH_NORMALS;
    uint64_t *words = (uint64_t *)(state + 24);
    const uint32_t *source = (const uint32_t *)(engine + 20);
    memset(state, 0, 24);
    memcpy(state, engine, 12); /* seed, left */
    state[12] = engine[12];    /* seeded */
    memcpy(state + 16, engine + 16, 4);
    for (int i = 0; i < 624; i++)
        words[i] = source[i];
    memset(state + TORCH_TAIL, 0, TORCH_STATE - TORCH_TAIL);
    if (normals[16]) {
        memcpy(state + TORCH_TAIL + 8, normals + 8, 8);
        state[TORCH_TAIL + 24] = 1;
    }
    if (normals[4]) {
        memcpy(state + TORCH_TAIL + 32, normals, 4);
        state[TORCH_TAIL + 36] = 1;
    }
}

static bool
capture_torch(const Random *self)
{
    if (self->engine != NULL) {
        write_torch((char *)self->view.buf + TORCH_AT, self->engine);
        return true;
    }
    PyObject *state = PyObject_CallNoArgs(self->torch);
    if (state == NULL)
        return false;
    PyObject *count = PyObject_CallMethodNoArgs(state, self->names.numel);
    bool fits = count != NULL && PyLong_AsSsize_t(count) == self->torch_bytes;
    Py_XDECREF(count);
    void *data = fits ? data_of(state, self->names.data_ptr) : NULL;
    if (data != NULL)
        memcpy((char *)self->view.buf + TORCH_AT, data, (size_t)self->torch_bytes);
    Py_DECREF(state);
    return data != NULL;
}

static PyObject *
random_capture(Random *self, PyObject *Py_UNUSED(ignored))
{
    if (self->view.buf == NULL) {
        PyErr_SetString(PyExc_ValueError, "the target of the capture is gone");
        return NULL;
    }
    long missing = 0;
    missing |= capture_python(self) ? 0 : PYTHON;
    PyErr_Clear(); /* Python asks in its own way for what is missing, and gets the error */
    missing |= capture_numpy(self) ? 0 : NUMPY;
    PyErr_Clear();
    missing |= capture_torch(self) ? 0 : TORCH;
    PyErr_Clear();
    return PyLong_FromLong(missing);
}

static bool
intern_names(Names *names)
{
    names->data_ptr = PyUnicode_InternFromString("data_ptr");
    names->numel = PyUnicode_InternFromString("numel");
    names->gauss_next = PyUnicode_InternFromString("gauss_next");
    names->bit_generator = PyUnicode_InternFromString("_bit_generator");
    return names->data_ptr && names->numel && names->gauss_next && names->bit_generator;
}

static void
drop_names(Names *names)
{
    Py_CLEAR(names->data_ptr);
    Py_CLEAR(names->numel);
    Py_CLEAR(names->gauss_next);
    Py_CLEAR(names->bit_generator);
}

static PyObject *
random_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"view", "python", "python_at", "numpy", "generator", "numpy_at", "has_gauss_at",
                            "gauss_at", "torch", "torch_bytes", "engine_at", NULL};
    PyObject *view, *python, *numpy, *generator, *torch;
    Py_ssize_t python_at, numpy_at, has_gauss_at, gauss_at, torch_bytes, engine_at = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOnOOnnnOn|n:Random", names, &view, &python, &python_at, &numpy,
                                     &generator, &numpy_at, &has_gauss_at, &gauss_at, &torch, &torch_bytes,
                                     &engine_at))
        return NULL;
    Random *self = (Random *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (!intern_names(&self->names) || PyObject_GetBuffer(view, &self->view, PyBUF_WRITABLE) < 0)
        goto failed;
    if (torch_bytes < 0 || self->view.len < TORCH_AT + torch_bytes || (uintptr_t)self->view.buf % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "the view is too small for a random state, or not aligned to 8");
        goto failed;
    }
    self->python = Py_NewRef(python);
    self->python_words = (const char *)python_at;
    self->numpy = Py_NewRef(numpy);
    self->generator = Py_NewRef(generator);
    self->numpy_words = (const char *)numpy_at;
    self->has_gauss = (const int *)has_gauss_at;
    self->gauss = (const double *)gauss_at;
    self->torch = Py_NewRef(torch);
    self->torch_bytes = torch_bytes;
    self->engine = torch_bytes == TORCH_STATE ? (const char *)engine_at : NULL;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int
random_traverse(Random *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->view.obj);
    Py_VISIT(self->python);
    Py_VISIT(self->numpy);
    Py_VISIT(self->generator);
    Py_VISIT(self->torch);
    return 0;
}

static int
random_clear(Random *self)
{
    PyBuffer_Release(&self->view);
    self->view.buf = NULL;
    Py_CLEAR(self->python);
    Py_CLEAR(self->numpy);
    Py_CLEAR(self->generator);
    Py_CLEAR(self->torch);
    return 0;
}

static void
random_dealloc(Random *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    random_clear(self);
    drop_names(&self->names);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef random_methods[] = {
    {"capture", (PyCFunction)random_capture, METH_NOARGS,
     PyDoc_STR("Write the random state into the view; the bits of PYTHON, NUMPY, TORCH that it could not.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot random_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Random(view, ...): one target of captures of the random state.")},
    {Py_tp_new, random_new},
    {Py_tp_dealloc, random_dealloc},
    {Py_tp_traverse, random_traverse},
    {Py_tp_clear, random_clear},
    {Py_tp_methods, random_methods},
    {0, NULL},
};

static PyType_Spec random_spec = {
    .name = "lastgasp.pytorch._copies.Random",
    .basicsize = sizeof(Random),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = random_slots,
};

/* ------------------------------------------------------------------------------------------------- Buffers */

typedef struct {
    PyObject *holder, *name, *tensor;
    PyObject *type, *data_ptr, *numel; /* the tensor's class and its methods, which are looked for once */
    const void *data;
    Py_ssize_t elements;
    size_t size, at; /* size 0: only looked at, Python copies it */
} Entry;

typedef struct {
    PyObject_HEAD
    PyObject *data_ptr, *numel;
    Py_buffer view;
    Py_ssize_t count;
    Entry *entries;
} Buffers;

/* Whether each name still stands for the very tensor. */
static PyObject *
buffers_same(Buffers *self, PyObject *Py_UNUSED(ignored))
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Entry *entry = &self->entries[i];
        PyObject *tensor = PyDict_GetItemWithError(entry->holder, entry->name);
        if (tensor == NULL && PyErr_Occurred() != NULL)
            return NULL;
        if (tensor != entry->tensor)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* False: a tensor has other memory by now, and what was copied is incomplete. */
static PyObject *
buffers_copy(Buffers *self, PyObject *Py_UNUSED(ignored))
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Entry *entry = &self->entries[i];
        if (entry->size == 0)
            continue;
        if ((PyObject *)Py_TYPE(entry->tensor) != entry->type)
            Py_RETURN_FALSE;
        PyObject *count = PyObject_CallOneArg(entry->numel, entry->tensor);
        if (count == NULL)
            return NULL;
        Py_ssize_t elements = PyLong_AsSsize_t(count);
        Py_DECREF(count);
        PyObject *number = PyObject_CallOneArg(entry->data_ptr, entry->tensor);
        if (number == NULL)
            return NULL;
        const void *data = PyLong_AsVoidPtr(number);
        Py_DECREF(number);
        if (PyErr_Occurred() != NULL)
            return NULL;
        if (data == NULL || data != entry->data || elements != entry->elements)
            Py_RETURN_FALSE;
        memcpy((char *)self->view.buf + entry->at, data, entry->size);
    }
    return PyBool_FromLong(self->view.buf != NULL);
}

static bool
take_entry(Buffers *self, PyObject *row)
{
    Entry entry = {0};
    PyObject *holder, *name, *tensor;
    Py_ssize_t size, at;
    if (!PyArg_ParseTuple(row, "O!UOnnn:Buffers", &PyDict_Type, &holder, &name, &tensor, &entry.elements, &size,
                          &at))
        return false;
    if (size < 0 || at < 0 || at > self->view.len || size > self->view.len - at) {
        PyErr_SetString(PyExc_ValueError, "a buffer lies outside of the view");
        return false;
    }
    if (size > 0 && (entry.data = data_of(tensor, self->data_ptr)) == NULL) {
        if (PyErr_Occurred() == NULL)
            PyErr_SetString(PyExc_ValueError, "a buffer has no memory");
        return false;
    }
    entry.size = (size_t)size;
    entry.at = (size_t)at;
    if (size > 0) {
        PyObject *type = (PyObject *)Py_TYPE(tensor);
        if ((entry.data_ptr = PyObject_GetAttr(type, self->data_ptr)) == NULL)
            return false;
        if ((entry.numel = PyObject_GetAttr(type, self->numel)) == NULL) {
            Py_DECREF(entry.data_ptr);
            return false;
        }
        entry.type = Py_NewRef(type);
    }
    entry.holder = Py_NewRef(holder);
    entry.name = Py_NewRef(name);
    entry.tensor = Py_NewRef(tensor);
    self->entries[self->count++] = entry;
    return true;
}

static PyObject *
buffers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"view", "entries", NULL};
    PyObject *view, *rows;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!:Buffers", names, &view, &PyTuple_Type, &rows))
        return NULL;
    Buffers *self = (Buffers *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->data_ptr = PyUnicode_InternFromString("data_ptr");
    self->numel = PyUnicode_InternFromString("numel");
    if (self->data_ptr == NULL || self->numel == NULL || PyObject_GetBuffer(view, &self->view, PyBUF_WRITABLE) < 0)
        goto failed;
    self->entries = PyMem_Calloc((size_t)PyTuple_GET_SIZE(rows) + 1, sizeof(Entry));
    if (self->entries == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); i++)
        if (!take_entry(self, PyTuple_GET_ITEM(rows, i)))
            goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int
buffers_traverse(Buffers *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->view.obj);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->entries[i].holder);
        Py_VISIT(self->entries[i].tensor);
        Py_VISIT(self->entries[i].type);
    }
    return 0;
}

static int
buffers_clear(Buffers *self)
{
    while (self->count > 0) {
        Entry *entry = &self->entries[--self->count];
        Py_CLEAR(entry->holder);
        Py_CLEAR(entry->name);
        Py_CLEAR(entry->tensor);
        Py_CLEAR(entry->type);
        Py_CLEAR(entry->data_ptr);
        Py_CLEAR(entry->numel);
    }
    PyBuffer_Release(&self->view);
    self->view.buf = NULL;
    return 0;
}

static void
buffers_dealloc(Buffers *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    buffers_clear(self);
    PyMem_Free(self->entries);
    Py_CLEAR(self->data_ptr);
    Py_CLEAR(self->numel);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef buffers_methods[] = {
    {"same", (PyCFunction)buffers_same, METH_NOARGS,
     PyDoc_STR("Whether each name still stands for the very tensor that it stood for.")},
    {"copy", (PyCFunction)buffers_copy, METH_NOARGS,
     PyDoc_STR("Copy all into the view; False where one has other memory by now. Call it where `same` said yes.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot buffers_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Buffers(view, ((holder, name, tensor, elements, size, at), ...)): copies of tensors.")},
    {Py_tp_new, buffers_new},
    {Py_tp_dealloc, buffers_dealloc},
    {Py_tp_traverse, buffers_traverse},
    {Py_tp_clear, buffers_clear},
    {Py_tp_methods, buffers_methods},
    {0, NULL},
};

static PyType_Spec buffers_spec = {
    .name = "lastgasp.pytorch._copies.Buffers",
    .basicsize = sizeof(Buffers),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = buffers_slots,
};

/* ---------------------------------------------------------------------------------------------- functions */

/* values(dictionaries) -> tuple: all their values, one dictionary behind the other. */
static PyObject *
values(PyObject *Py_UNUSED(module), PyObject *dictionaries)
{
    if (!PyTuple_Check(dictionaries)) {
        PyErr_SetString(PyExc_TypeError, "values: a tuple of dictionaries is needed");
        return NULL;
    }
    Py_ssize_t count = 0, at = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dictionaries); i++) {
        if (!PyDict_Check(PyTuple_GET_ITEM(dictionaries, i))) {
            PyErr_SetString(PyExc_TypeError, "values: a tuple of dictionaries is needed");
            return NULL;
        }
        count += PyDict_GET_SIZE(PyTuple_GET_ITEM(dictionaries, i));
    }
    PyObject *found = PyTuple_New(count);
    if (found == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dictionaries); i++) {
        PyObject *value;
        Py_ssize_t place = 0;
        while (PyDict_Next(PyTuple_GET_ITEM(dictionaries, i), &place, NULL, &value))
            PyTuple_SET_ITEM(found, at++, Py_NewRef(value));
    }
    return found;
}

/* Whether each of `names` stands for the very object in an object's `__dict__`, whose name `name` is; and the number of
 * its entries is `count`. */
static bool
same_attributes(PyObject *value, PyObject *name, PyObject *names, PyObject *expected, Py_ssize_t count)
{
    PyObject *own = PyObject_GetAttr(value, name);
    if (own == NULL)
        return false;
    bool same = PyDict_Check(own) && PyDict_GET_SIZE(own) == count;
    for (Py_ssize_t i = 0; same && i < PyTuple_GET_SIZE(names); i++)
        same = PyDict_GetItemWithError(own, PyTuple_GET_ITEM(names, i)) == PyTuple_GET_ITEM(expected, i);
    Py_DECREF(own);
    return same;
}

/* Whether a dict has the very keys and values of another one, in the same order. */
static bool
same_entries(PyObject *value, PyObject *expected)
{
    PyObject *key, *item, *known_key, *known;
    Py_ssize_t at = 0, known_at = 0;
    if (PyDict_GET_SIZE(value) != PyDict_GET_SIZE(expected))
        return false;
    while (PyDict_Next(value, &at, &key, &item))
        if (!PyDict_Next(expected, &known_at, &known_key, &known) || key != known_key || item != known)
            return false;
    return true;
}

/* Whether a list has the very items of another one. */
static bool
same_items(PyObject *value, PyObject *expected)
{
    size_t size = (size_t)PyList_GET_SIZE(value) * sizeof(PyObject *);
    if (PyList_GET_SIZE(value) != PyList_GET_SIZE(expected))
        return false;
    return size == 0 || memcmp(((PyListObject *)value)->ob_item, ((PyListObject *)expected)->ob_item, size) == 0;
}

/* As `holds` of compiled.py. */
static bool
is_same(PyObject *dict, PyObject *value, PyObject *type, PyObject *names, PyObject *expected, Py_ssize_t count)
{
    if ((PyObject *)Py_TYPE(value) != type || expected == Py_None)
        return false;
    if (PyTuple_CheckExact(names) && PyTuple_CheckExact(expected)
        && PyTuple_GET_SIZE(names) == PyTuple_GET_SIZE(expected))
        return same_attributes(value, dict, names, expected, count);
    if (PyDict_CheckExact(value) && PyDict_CheckExact(expected))
        return same_entries(value, expected);
    return PyList_CheckExact(value) && PyList_CheckExact(expected) && same_items(value, expected);
}

/* changes(checks) -> None or the numbers of those that do not hold any more, see compiled.py. */
static PyObject *
changes(PyObject *Py_UNUSED(module), PyObject *checks)
{
    if (!PyList_CheckExact(checks)) {
        PyErr_SetString(PyExc_TypeError, "changes: a list of tuples is needed");
        return NULL;
    }
    PyObject *found = NULL, *dict = PyUnicode_InternFromString("__dict__");
    if (dict == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(checks); i++) {
        PyObject *check = Py_NewRef(PyList_GET_ITEM(checks, i));
        Py_ssize_t count = -1;
        if (!PyTuple_CheckExact(check) || PyTuple_GET_SIZE(check) != 5)
            PyErr_SetString(PyExc_TypeError, "changes: a list of tuples of five is needed");
        else
            count = PyLong_AsSsize_t(PyTuple_GET_ITEM(check, 4));
        if (PyErr_Occurred() != NULL) {
            Py_DECREF(check);
            goto failed;
        }
        bool same = is_same(dict, PyTuple_GET_ITEM(check, 0), PyTuple_GET_ITEM(check, 1), PyTuple_GET_ITEM(check, 2),
                            PyTuple_GET_ITEM(check, 3), count);
        Py_DECREF(check);
        PyErr_Clear(); /* of a `__dict__` of the user's: Python asks again, and gets the error */
        if (same)
            continue;
        PyObject *number = PyLong_FromSsize_t(i);
        if (number == NULL || (found == NULL && (found = PyList_New(0)) == NULL) || PyList_Append(found, number) < 0) {
            Py_XDECREF(number);
            goto failed;
        }
        Py_DECREF(number);
    }
    Py_DECREF(dict);
    return found != NULL ? found : Py_NewRef(Py_None);
failed:
    Py_DECREF(dict);
    Py_XDECREF(found);
    return NULL;
}

/* -------------------------------------------------------------------------------------- what is seen of tensors */

typedef struct {
    PyObject *version, *data_ptr;
} Asked;

static Asked asked; /* names, made once */

/* Where a tensor's memory is and how often it was changed; false with an exception set. */
static bool
place_of(PyObject *tensor, long long *version, const char **memory)
{
    PyObject *found = PyObject_GetAttr(tensor, asked.version);
    if (found == NULL)
        return false;
    *version = PyLong_AsLongLong(found);
    Py_DECREF(found);
    if (*version == -1 && PyErr_Occurred() != NULL)
        return false;
    *memory = data_of(tensor, asked.data_ptr);
    return *memory != NULL || PyErr_Occurred() == NULL;
}

/* look(tensor, address, step, count) -> (version, each `step`-th byte), or None where its memory is elsewhere.
 * Who calls it keeps the memory at the address alive. */
static PyObject *
look(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    if (given != 4) {
        PyErr_SetString(PyExc_TypeError, "look: four arguments are needed");
        return NULL;
    }
    const char *memory, *known = PyLong_AsVoidPtr(args[1]);
    Py_ssize_t step = PyLong_AsSsize_t(args[2]), count = PyLong_AsSsize_t(args[3]);
    long long version;
    if (PyErr_Occurred() != NULL || !place_of(args[0], &version, &memory))
        return NULL;
    if (memory == NULL || memory != known)
        Py_RETURN_NONE;
    PyObject *found = PyBytes_FromStringAndSize(NULL, count);
    if (found == NULL)
        return NULL;
    char *into = PyBytes_AS_STRING(found);
    if (step == 1)
        memcpy(into, memory, (size_t)count);
    else
        for (Py_ssize_t i = 0; i < count; i++)
            into[i] = memory[i * step];
    return Py_BuildValue("LN", version, found);
}

/* unchanged(tensor, version, address, step, bytes) -> whether `look` would return these. */
static PyObject *
unchanged(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    if (given != 5 || !PyBytes_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "unchanged: five arguments are needed, the last one bytes");
        return NULL;
    }
    const char *memory, *known = PyLong_AsVoidPtr(args[2]), *bytes = PyBytes_AS_STRING(args[4]);
    Py_ssize_t step = PyLong_AsSsize_t(args[3]), count = PyBytes_GET_SIZE(args[4]);
    long long version, before = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() != NULL || !place_of(args[0], &version, &memory))
        return NULL;
    if (memory == NULL || memory != known || version != before)
        Py_RETURN_FALSE;
    if (step == 1)
        return PyBool_FromLong(memcmp(bytes, memory, (size_t)count) == 0);
    for (Py_ssize_t i = 0; i < count; i++)
        if (bytes[i] != memory[i * step])
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

/* truths(objects, name) -> a byte for each of a list: whether that attribute of it is true. */
static PyObject *
truths(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    if (given != 2 || !PyList_CheckExact(args[0]) || !PyUnicode_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "truths: a list and a name are needed");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[0]);
    PyObject *found = PyBytes_FromStringAndSize(NULL, count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyObject *one = i < PyList_GET_SIZE(args[0]) ? PyObject_GetAttr(PyList_GET_ITEM(args[0], i), args[1]) : NULL;
        int is = one != NULL ? PyObject_IsTrue(one) : -1;
        Py_XDECREF(one);
        if (is < 0)
            Py_CLEAR(found);
        else
            PyBytes_AS_STRING(found)[i] = (char)is;
    }
    if (found == NULL && PyErr_Occurred() == NULL)
        PyErr_SetString(PyExc_RuntimeError, "truths: the list has become shorter");
    return found;
}

static PyObject *
torch_state(PyObject *Py_UNUSED(module), PyObject *engine)
{
    const char *address = PyLong_AsVoidPtr(engine);
    if (address == NULL && PyErr_Occurred() != NULL)
        return NULL;
    uint64_t state[TORCH_STATE / 8];
    write_torch((char *)state, address);
    return PyBytes_FromStringAndSize((char *)state, TORCH_STATE);
}

static PyMethodDef functions[] = {
    {"changes", changes, METH_O, PyDoc_STR("changes(checks): numbers of those that do not hold any more, or None.")},
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL,
     PyDoc_STR("look(tensor, address, step, count): its version and each step-th byte, or None if it is elsewhere.")},
    {"unchanged", (PyCFunction)(void (*)(void))unchanged, METH_FASTCALL,
     PyDoc_STR("unchanged(tensor, version, address, step, bytes): whether look would return these.")},
    {"truths", (PyCFunction)(void (*)(void))truths, METH_FASTCALL,
     PyDoc_STR("truths(objects, name): a byte for each, whether that attribute is true.")},
    {"torch_state", torch_state, METH_O, PyDoc_STR("torch_state(address): what get_state returns, from that memory.")},
    {"values", values, METH_O, PyDoc_STR("values(dictionaries): a tuple of all their values.")},
    {NULL, NULL, 0, NULL},
};

/* -------------------------------------------------------------------------------------------------- module */

static int
add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed;
}

static int
module_exec(PyObject *module)
{
    asked.version = PyUnicode_InternFromString("_version");
    asked.data_ptr = PyUnicode_InternFromString("data_ptr");
    if (asked.version == NULL || asked.data_ptr == NULL)
        return -1;
    if (add_type(module, &random_spec) < 0 || add_type(module, &buffers_spec) < 0)
        return -1;
    if (PyModule_AddIntMacro(module, PYTHON) < 0 || PyModule_AddIntMacro(module, NUMPY) < 0
        || PyModule_AddIntMacro(module, TORCH) < 0)
        return -1;
    return PyModule_AddIntMacro(module, LAYOUT) < 0 ? -1 : PyModule_AddIntMacro(module, INTERFACE);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lastgasp.pytorch._copies",
    .m_doc = PyDoc_STR("Copies and comparisons at the end of each step."),
    .m_slots = module_slots,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__copies(void)
{
    return PyModuleDef_Init(&module_def);
}
