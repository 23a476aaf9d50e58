/* The writer of the marks ring (format.py has the layout): a begin and an end per mark, each some 40 ns.
 *
 * Why C: the same in Python costs several times as much (docs/facts/limits.md §1), and marks surround every
 * step, batch and collective. pyring.py does the same where no compiler was there at install; both pass the
 * same tests.
 *
 * Everything here runs under the GIL, so plain stores are enough but for two words: `head` is released after the
 * record it covers, and `tail` is acquired, because the reader after a SIGKILL is another process.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x31534b52414d474cULL /* "LGMARKS1", little endian */
#define LAYOUT 1 /* format.py: VERSION */
#define INTERFACE 2 /* of the functions; writer.py */
#define DEPTH 64

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

typedef struct {
    uint64_t magic;
    uint32_t version, record_size;
    uint64_t capacity, head, tail, dropped, next_id;
    int64_t wall_offset;
    uint32_t mask, names, pid, rank, world_size;
    int32_t device;
} Header;

typedef struct {
    uint64_t begin, end, id;
    int64_t value;
    uint64_t device_begin, device_end;
    uint32_t name, thread;
    uint64_t unused;
} Record;

_Static_assert(offsetof(Header, device) == 84, "format.py: OFFSETS");
_Static_assert(sizeof(Record) == 64, "format.py: RECORD");

/* ---------------------------------------------------------------------------------------------------- Ring */

typedef struct {
    PyObject_HEAD
    const uint32_t *mask; /* the header's word, or `nothing`: one load tells whether a mark is on */
    Header *header;       /* NULL once detached */
    Record *records;
    uint64_t wrap;
    Py_buffer view;
} Ring;

/* What a detached ring's mask points to. A forked child must not switch its marks off in the header: the
 * mapping is its parent's as well. */
static const uint32_t nothing = 0;

static bool
sound(const Py_buffer *view, Py_ssize_t at)
{
    const Header *header = view->buf;
    return at >= (Py_ssize_t)sizeof(Header) && at % 64 == 0 && view->len > at && (uintptr_t)header % 64 == 0
        && header->magic == MAGIC && header->version == LAYOUT && header->record_size == sizeof(Record)
        && header->capacity > 0 && (header->capacity & (header->capacity - 1)) == 0
        && header->capacity <= (uint64_t)(view->len - at) / sizeof(Record);
}

static PyObject *
ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "records_at", NULL};
    PyObject *memory;
    Py_ssize_t at;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On:Ring", names, &memory, &at))
        return NULL;
    Ring *self = (Ring *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->mask = &nothing;
    if (PyObject_GetBuffer(memory, &self->view, PyBUF_WRITABLE) < 0)
        goto failed;
    if (!sound(&self->view, at)) {
        PyErr_SetString(PyExc_ValueError, "the memory does not begin with the header of a marks ring of version 1");
        goto failed;
    }
    self->header = self->view.buf;
    self->records = (Record *)((char *)self->view.buf + at);
    self->wrap = self->header->capacity - 1;
    self->mask = &self->header->mask;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyObject *
ring_detach(Ring *self, PyObject *Py_UNUSED(ignored))
{
    self->mask = &nothing;
    self->header = NULL;
    self->records = NULL;
    PyBuffer_Release(&self->view);
    Py_RETURN_NONE;
}

static PyObject *
ring_take_id(Ring *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLongLong(self->header == NULL ? 0 : self->header->next_id++);
}

static int
ring_traverse(Ring *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->view.obj);
    return 0;
}

static int
ring_clear(Ring *self)
{
    Py_XDECREF(ring_detach(self, NULL));
    return 0;
}

static void
ring_dealloc(Ring *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    ring_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* The caller has seen that the ring is attached. False: it is full, the record was counted and is lost. */
static bool
ring_write(Ring *ring, const Record *record)
{
    Header *header = ring->header;
    uint64_t head = header->head;
    if (unlikely(head - __atomic_load_n(&header->tail, __ATOMIC_ACQUIRE) > ring->wrap)) {
        header->dropped += 1;
        return false;
    }
    ring->records[head & ring->wrap] = *record;
    __atomic_store_n(&header->head, head + 1, __ATOMIC_RELEASE);
    return true;
}

static PyMethodDef ring_methods[] = {
    {"detach", (PyCFunction)ring_detach, METH_NOARGS, PyDoc_STR("Let go of the memory; all marks are off for good.")},
    {"take_id", (PyCFunction)ring_take_id, METH_NOARGS, PyDoc_STR("The next range's id, for a row of one's own.")},
    {NULL, NULL, 0, NULL},
};

static PyObject *
ring_mask(Ring *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(*self->mask);
}

static PyGetSetDef ring_getters[] = {
    {"mask", (getter)ring_mask, NULL, PyDoc_STR("What is on; 0 once detached."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Ring(memory, records_at): writes records of finished ranges.")},
    {Py_tp_new, ring_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_traverse, ring_traverse},
    {Py_tp_clear, ring_clear},
    {Py_tp_methods, ring_methods},
    {Py_tp_getset, ring_getters},
    {0, NULL},
};

static PyType_Spec ring_spec = {
    .name = "lastgasp.steps._ring.Ring",
    .basicsize = sizeof(Ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = ring_slots,
};

/* ---------------------------------------------------------------------------------------------------- Mark */

typedef struct {
    uint64_t begin, id;
    int64_t value;
    uint32_t thread;
    uint32_t inner; /* begins inside this range that are not recorded, and whose ends are still to come */
} Open;

typedef struct {
    PyObject_HEAD
    Ring *ring;
    uint32_t bit;
    uint32_t name;
    uint32_t depth;
    long long value;
    PyObject *enter, *leave; /* what `with` calls, see Bound */
    Open open[DEPTH];
} Mark;

/* A thread's number never changes, and asking for it is a system call. */
static _Thread_local uint32_t own_thread;

static inline uint32_t
thread_id(void)
{
    if (unlikely(own_thread == 0))
        own_thread = (uint32_t)syscall(SYS_gettid);
    return own_thread;
}

static inline uint64_t
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static Open *
innermost(Mark *mark)
{
    uint32_t thread = thread_id();
    for (uint32_t i = mark->depth; i-- > 0;)
        if (mark->open[i].thread == thread)
            return &mark->open[i];
    return NULL;
}

static void
take_out(Mark *mark, Open *entry)
{
    mark->depth -= 1;
    memmove(entry, entry + 1, (size_t)(&mark->open[mark->depth] - entry) * sizeof(Open));
}

/* Threads that ended inside a range would fill the places for ever. */
static void
forget_dead_threads(Mark *mark)
{
    int error = errno;
    for (uint32_t i = mark->depth; i-- > 0;)
        if (syscall(SYS_tgkill, getpid(), (int)mark->open[i].thread, 0) != 0 && errno == ESRCH)
            take_out(mark, &mark->open[i]);
    errno = error;
}

/* Its end will come, and must not be taken for that of the recorded range around it. */
static void
begin_unrecorded(Mark *mark)
{
    Open *outer = innermost(mark);
    if (outer != NULL)
        outer->inner += 1;
}

static inline void
mark_begin(Mark *mark)
{
    if (!(*mark->ring->mask & mark->bit)) {
        if (unlikely(mark->depth > 0))
            begin_unrecorded(mark);
        return;
    }
    if (unlikely(mark->depth == DEPTH))
        forget_dead_threads(mark);
    Header *header = mark->ring->header;
    if (unlikely(mark->depth == DEPTH)) {
        header->dropped += 1;
        begin_unrecorded(mark);
        return;
    }
    Open *entry = &mark->open[mark->depth++];
    *entry = (Open){.id = header->next_id++, .value = mark->value, .thread = thread_id()};
    entry->begin = now();
}

/* `value`: what the range ends as; NULL: what it began as. */
static void
end_recorded(Mark *mark, const int64_t *value)
{
    uint64_t end = now();
    Open *entry = innermost(mark);
    if (entry == NULL)
        return;
    if (unlikely(entry->inner > 0)) {
        entry->inner -= 1;
        return;
    }
    Record record = {
        .begin = entry->begin, .end = end, .id = entry->id, .value = value == NULL ? entry->value : *value,
        .name = mark->name, .thread = entry->thread,
    };
    take_out(mark, entry);
    if (likely(mark->ring->header != NULL))
        ring_write(mark->ring, &record);
}

static inline void
mark_end(Mark *mark)
{
    if (mark->depth > 0)
        end_recorded(mark, NULL);
}

static PyObject *
mark_begin_method(Mark *self, PyObject *Py_UNUSED(ignored))
{
    mark_begin(self);
    Py_RETURN_NONE;
}

static PyObject *
mark_end_method(Mark *self, PyObject *Py_UNUSED(ignored))
{
    mark_end(self);
    Py_RETURN_NONE;
}

static bool
as_time(PyObject *number, uint64_t *time)
{
    *time = PyLong_AsUnsignedLongLong(number);
    return *time != UINT64_MAX || PyErr_Occurred() == NULL;
}

static bool
as_value(PyObject *number, int64_t *value)
{
    *value = PyLong_AsLongLong(number);
    return *value != -1 || PyErr_Occurred() == NULL;
}

static PyObject *
mark_end_as_method(Mark *self, PyObject *number)
{
    int64_t value;
    if (!as_value(number, &value))
        return NULL;
    if (self->depth > 0)
        end_recorded(self, &value);
    Py_RETURN_NONE;
}

static PyObject *
mark_cancel_method(Mark *self, PyObject *Py_UNUSED(ignored))
{
    Open *entry = innermost(self);
    if (entry == NULL)
        Py_RETURN_FALSE;
    if (entry->inner > 0)
        entry->inner -= 1;
    else
        take_out(self, entry);
    Py_RETURN_TRUE;
}

/* One by one: `as_value` may run Python, which must not begin with an error set. */
static PyObject *
mark_put_method(Mark *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "put(begin, end, value, device_begin, device_end)");
        return NULL;
    }
    Record record = {.name = self->name, .thread = thread_id()};
    if (!as_time(args[0], &record.begin) || !as_time(args[1], &record.end) || !as_value(args[2], &record.value)
        || !as_time(args[3], &record.device_begin) || !as_time(args[4], &record.device_end))
        return NULL;
    if (self->ring->header == NULL)
        Py_RETURN_FALSE;
    record.id = self->ring->header->next_id++;
    return PyBool_FromLong(ring_write(self->ring, &record));
}

static PyObject *
mark_exit_method(Mark *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count))
{
    mark_end(self);
    Py_RETURN_NONE;
}

static PyMethodDef enter_def = {"__enter__", (PyCFunction)mark_begin_method, METH_NOARGS, PyDoc_STR("As begin().")};
static PyMethodDef leave_def = {
    "__exit__", (PyCFunction)(void (*)(void))mark_exit_method, METH_FASTCALL, PyDoc_STR("As end()."),
};

static PyObject *
mark_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ring", "name", "bit", NULL};
    PyTypeObject **ring_type = PyType_GetModuleState(type);
    PyObject *ring;
    unsigned int name, bit;
    if (ring_type == NULL)
        return NULL;
    if (*ring_type == NULL) { /* the interpreter is ending */
        PyErr_SetString(PyExc_RuntimeError, "the module lastgasp.steps._ring was taken down");
        return NULL;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!II:Mark", names, *ring_type, &ring, &name, &bit))
        return NULL;
    Mark *self = (Mark *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ring = (Ring *)Py_NewRef(ring);
    self->name = name;
    self->bit = bit;
    self->enter = PyCFunction_New(&enter_def, (PyObject *)self);
    self->leave = PyCFunction_New(&leave_def, (PyObject *)self);
    if (self->enter == NULL || self->leave == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
mark_traverse(Mark *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->ring);
    Py_VISIT(self->enter);
    Py_VISIT(self->leave);
    return 0;
}

/* The ring stays: whoever still holds the mark may use it, and the ring breaks its own cycles. */
static int
mark_clear(Mark *self)
{
    Py_CLEAR(self->enter);
    Py_CLEAR(self->leave);
    return 0;
}

static void
mark_dealloc(Mark *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    mark_clear(self);
    Py_XDECREF(self->ring);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef mark_methods[] = {
    {"begin", (PyCFunction)mark_begin_method, METH_NOARGS, PyDoc_STR("The range begins, on this thread.")},
    {"end", (PyCFunction)mark_end_method, METH_NOARGS, PyDoc_STR("This thread's innermost range ends.")},
    {"end_as", (PyCFunction)mark_end_as_method, METH_O,
     PyDoc_STR("end_as(value): the same, with this value instead of the one that it began with.")},
    {"cancel", (PyCFunction)mark_cancel_method, METH_NOARGS, PyDoc_STR("Forget this thread's innermost range.")},
    {"put", (PyCFunction)(void (*)(void))mark_put_method, METH_FASTCALL,
     PyDoc_STR("put(begin, end, value, device_begin, device_end): a range timed elsewhere; False: dropped.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef mark_members[] = {
    {"value", T_LONGLONG, offsetof(Mark, value), 0, PyDoc_STR("Printed in place of {}; taken by begin().")},
    {"name", T_UINT, offsetof(Mark, name), READONLY, PyDoc_STR("Slot of the name in the ring.")},
    {"bit", T_UINT, offsetof(Mark, bit), READONLY, PyDoc_STR("Which bit of the mask switches it.")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot mark_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Mark(ring, name, bit): a range that can be begun and ended again and again.")},
    {Py_tp_new, mark_new},
    {Py_tp_dealloc, mark_dealloc},
    {Py_tp_traverse, mark_traverse},
    {Py_tp_clear, mark_clear},
    {Py_tp_methods, mark_methods},
    {Py_tp_members, mark_members},
    {0, NULL},
};

static PyType_Spec mark_spec = {
    .name = "lastgasp.steps._ring.Mark",
    .basicsize = sizeof(Mark),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = mark_slots,
};

/* --------------------------------------------------------------------------------------------------- Bound */

/* `with` looks its two methods up in the type and binds them, which makes and frees two objects: half of what a
 * mark costs that is switched off. So each mark keeps them bound. Through a mark this descriptor hands them out;
 * taken from the class and called, as contextlib.ExitStack does, it is the plain method. */
typedef struct {
    PyObject_HEAD
    PyTypeObject *owner;
    size_t offset;
} Bound;

static PyObject *
bound_get(Bound *self, PyObject *mark, PyObject *Py_UNUSED(type))
{
    if (mark == NULL)
        return Py_NewRef(self);
    if (unlikely(Py_TYPE(mark) != self->owner))
        return PyErr_Format(PyExc_TypeError, "a mark is needed, not %R", mark);
    PyObject *method = *(PyObject **)((char *)mark + self->offset);
    if (unlikely(method == NULL)) { /* the garbage collector has taken the mark apart */
        PyErr_SetString(PyExc_AttributeError, "the mark is gone");
        return NULL;
    }
    return Py_NewRef(method);
}

static PyObject *
bound_call(Bound *self, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) < 1) {
        PyErr_SetString(PyExc_TypeError, "a mark is missing");
        return NULL;
    }
    PyObject *method = bound_get(self, PyTuple_GET_ITEM(args, 0), NULL);
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    PyObject *result = method == NULL || rest == NULL ? NULL : PyObject_Call(method, rest, kwargs);
    Py_XDECREF(rest);
    Py_XDECREF(method);
    return result;
}

static int
bound_traverse(Bound *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->owner);
    return 0;
}

static int
bound_clear(Bound *self)
{
    Py_CLEAR(self->owner);
    return 0;
}

static void
bound_dealloc(Bound *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    bound_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot bound_slots[] = {
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_traverse, bound_traverse},
    {Py_tp_clear, bound_clear},
    {Py_tp_descr_get, bound_get},
    {Py_tp_call, bound_call},
    {0, NULL},
};

static PyType_Spec bound_spec = {
    .name = "lastgasp.steps._ring.Bound",
    .basicsize = sizeof(Bound),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = bound_slots,
};

static int
keep_bound(PyTypeObject *bound_type, PyObject *mark_type, const char *name, size_t offset)
{
    Bound *bound = (Bound *)bound_type->tp_alloc(bound_type, 0);
    if (bound == NULL)
        return -1;
    bound->owner = (PyTypeObject *)Py_NewRef(mark_type);
    bound->offset = offset;
    int failed = PyObject_SetAttrString(mark_type, name, (PyObject *)bound);
    Py_DECREF(bound);
    return failed;
}

/* -------------------------------------------------------------------------------------------------- module */

static PyObject *
forget_thread(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    own_thread = 0;
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"forget_thread", forget_thread, METH_NOARGS, PyDoc_STR("In a forked child: the thread has another id now.")},
    {NULL, NULL, 0, NULL},
};

static int
add_mark_type(PyObject *module)
{
    PyObject *mark_type = PyType_FromModuleAndSpec(module, &mark_spec, NULL);
    PyObject *bound_type = PyType_FromModuleAndSpec(module, &bound_spec, NULL);
    int failed = mark_type == NULL || bound_type == NULL
        || keep_bound((PyTypeObject *)bound_type, mark_type, "__enter__", offsetof(Mark, enter)) < 0
        || keep_bound((PyTypeObject *)bound_type, mark_type, "__exit__", offsetof(Mark, leave)) < 0
        || PyModule_AddType(module, (PyTypeObject *)mark_type) < 0;
    Py_XDECREF(bound_type);
    Py_XDECREF(mark_type);
    return failed ? -1 : 0;
}

/* The module's state is the type Ring: what a Mark must be given. */
static int
module_exec(PyObject *module)
{
    PyTypeObject **ring_type = PyModule_GetState(module);
    *ring_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ring_spec, NULL);
    if (*ring_type == NULL || PyModule_AddType(module, *ring_type) < 0 || add_mark_type(module) < 0)
        return -1;
    return PyModule_AddIntMacro(module, LAYOUT) < 0 ? -1 : PyModule_AddIntMacro(module, INTERFACE);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(*(PyTypeObject **)PyModule_GetState(module));
    return 0;
}

static int
module_clear(PyObject *module)
{
    Py_CLEAR(*(PyTypeObject **)PyModule_GetState(module));
    return 0;
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
    .m_name = "lastgasp.steps._ring",
    .m_doc = PyDoc_STR("Writes finished ranges into the marks ring."),
    .m_size = sizeof(PyTypeObject *),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__ring(void)
{
    return PyModuleDef_Init(&module_def);
}
