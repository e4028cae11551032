/* The statistics of a tensor in one pass, for hookrun/kernels/statistics.py.

   Sums are computed in double precision after subtracting an element of the tensor, so that a mean that is much larger
   than the deviation loses no precision. The division into parts, and so the result, does not depend on the number of
   threads.

   No headers of Python or torch are needed: only Python's stable ABI is used, and tensors are read through DLPack's
   exchange functions (dmlc/dlpack, version 1), read-only. */

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* ---- Python's stable ABI ------------------------------------------------------------------------------------- */

typedef struct PyObject PyObject;
typedef PyObject *(*Function)(PyObject *self, PyObject *const *arguments, ptrdiff_t count);
typedef struct {
    const char *name;
    Function function;
    int flags;
    const char *doc;
} PyMethodDef;
enum { METH_FASTCALL = 0x80 };

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyObject *PyCFunction_NewEx(PyMethodDef *definition, PyObject *self, PyObject *module);
extern PyObject *PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *));
extern void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
extern PyObject *PyFloat_FromDouble(double value);
extern PyObject *PyLong_FromLongLong(long long value);
extern PyObject *PyTuple_New(ptrdiff_t size);
extern int PyTuple_SetItem(PyObject *tuple, ptrdiff_t place, PyObject *stolen);
extern PyObject *PyTuple_GetItem(PyObject *tuple, ptrdiff_t place);
extern PyObject *PyDict_Copy(PyObject *dict);
extern int PyDict_SetItem(PyObject *dict, PyObject *key, PyObject *value);
extern PyObject *PyList_New(ptrdiff_t size);
extern ptrdiff_t PyList_Size(PyObject *list);
extern int PyList_SetItem(PyObject *list, ptrdiff_t place, PyObject *stolen);
extern int PyList_Append(PyObject *list, PyObject *value);
extern PyObject *PyObject_Type(PyObject *object);
extern void Py_IncRef(PyObject *object);
extern void Py_DecRef(PyObject *object);
extern void PyErr_Clear(void);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *state);

/* ---- DLPack --------------------------------------------------------------------------------------------------- */

typedef struct {
    void *data;
    struct { int32_t type, number; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous;
    void *allocate, *owned_from_object, *object_from_owned;
    int (*from_object)(void *object, DLTensor *out);
    void *stream;
} Exchange;

enum { CPU = 1, FLOAT = 2, BFLOAT = 4 };

/* ---- one block ------------------------------------------------------------------------------------------------ */

/* Numbers of elements: of a block, which fits a core's cache; of a block of 16-bit floats, which are converted first;
   and of a part, whose blocks are added up in order. */
enum { BLOCK = 8192, BLOCK_OF_HALVES = 2048, PART = 16 * BLOCK };

typedef struct {
    double n, mean, spread; /* spread: the sum of (x - mean)^2 */
    double squares, absolute, low, high;
    long double sum;
    int64_t zeros, nans, infs;
} Moments;

enum { WITH_ABSOLUTE = 1, WITH_ZEROS = 2 };

/* The first element is subtracted from all elements before they are summed, so that a large mean loses no precision.
   The sum of squares follows from these sums; for float64, whose result is not rounded to float32, it is also summed
   directly.

   The four quarters of a block are read in parallel: the processor prefetches four streams better than one, and no
   addition waits for the one before it. */
#define MEASURE_BLOCK(NAME, T, WIDE)                                                                                  \
    static void NAME(const T *restrict x, int n, int flags, Moments *out)                                             \
    {                                                                                                                 \
        double centre = isfinite(x[0]) ? (double)x[0] : 0;                                                            \
        double o0 = 0, o1 = 0, o2 = 0, o3 = 0;  /* off */                                                             \
        double a0 = 0, a1 = 0, a2 = 0, a3 = 0;  /* around */                                                          \
        double s0 = 0, s1 = 0, s2 = 0, s3 = 0;  /* squares */                                                         \
        T low = x[0], high = x[0];                                                                                    \
        int quarter = n / 4;                                                                                          \
        const T *restrict y = x + quarter, *restrict z = y + quarter, *restrict w = z + quarter;                      \
        _Pragma("omp simd reduction(+:o0,o1,o2,o3,a0,a1,a2,a3,s0,s1,s2,s3) reduction(min:low) reduction(max:high)")   \
        for (int i = 0; i < quarter; i++) {                                                                           \
            double d0 = (double)x[i] - centre, d1 = (double)y[i] - centre;                                            \
            double d2 = (double)z[i] - centre, d3 = (double)w[i] - centre;                                            \
            o0 += d0, o1 += d1, o2 += d2, o3 += d3;                                                                   \
            a0 += d0 * d0, a1 += d1 * d1, a2 += d2 * d2, a3 += d3 * d3;                                               \
            if (WIDE) {                                                                                               \
                s0 += (double)x[i] * (double)x[i], s1 += (double)y[i] * (double)y[i];                                 \
                s2 += (double)z[i] * (double)z[i], s3 += (double)w[i] * (double)w[i];                                 \
            }                                                                                                         \
            T low0 = x[i] < y[i] ? x[i] : y[i], low1 = z[i] < w[i] ? z[i] : w[i];                                     \
            T high0 = x[i] > y[i] ? x[i] : y[i], high1 = z[i] > w[i] ? z[i] : w[i];                                   \
            low0 = low0 < low1 ? low0 : low1, high0 = high0 > high1 ? high0 : high1;                                  \
            low = low0 < low ? low0 : low, high = high0 > high ? high0 : high;                                        \
        }                                                                                                             \
        double off = o0 + o1 + (o2 + o3), around = a0 + a1 + (a2 + a3), squares = s0 + s1 + (s2 + s3);                \
        for (int i = 4 * quarter; i < n; i++) {                                                                       \
            double d = (double)x[i] - centre;                                                                         \
            off += d, around += d * d, squares += (double)x[i] * (double)x[i];                                        \
            low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;                                          \
        }                                                                                                             \
        if (!(WIDE))                                                                                                  \
            squares = around + centre * (2 * off + centre * n);                                                       \
        out->n = n;                                                                                                   \
        out->sum = (long double)centre * n + off;                                                                     \
        out->mean = centre + off / n;                                                                                 \
        out->spread = around - off * (off / n);                                                                       \
        out->squares = squares;                                                                                       \
        out->low = low;                                                                                               \
        out->high = high;                                                                                             \
        out->absolute = 0;                                                                                            \
        out->zeros = out->nans = out->infs = 0;                                                                       \
        if (flags & WITH_ABSOLUTE) {                                                                                  \
            double sum = 0;                                                                                           \
            _Pragma("omp simd reduction(+ : sum)")                                                                    \
            for (int i = 0; i < n; i++)                                                                               \
                sum += x[i] < 0 ? -(double)x[i] : (double)x[i];                                                       \
            out->absolute = sum;                                                                                      \
        }                                                                                                             \
        if (flags & WITH_ZEROS) {                                                                                     \
            int count = 0;                                                                                            \
            _Pragma("omp simd reduction(+ : count)")                                                                  \
            for (int i = 0; i < n; i++)                                                                               \
                count += x[i] == 0;                                                                                   \
            out->zeros = count;                                                                                       \
        }                                                                                                             \
        if (!(isfinite(around) && isfinite(out->mean)))                                                               \
            NAME##_not_finite(x, n, out);                                                                             \
    }

/* The slow path: an element of the block, or the sum of the squared differences, is not finite. */
#define NOT_FINITE(NAME, T)                                                                                           \
    static void NAME##_not_finite(const T *x, int n, Moments *out)                                                    \
    {                                                                                                                 \
        double sum = 0, squares = 0, low = INFINITY, high = -INFINITY;                                                \
        for (int i = 0; i < n; i++) {                                                                                 \
            out->nans += isnan(x[i]) != 0;                                                                            \
            out->infs += isinf(x[i]) != 0;                                                                            \
            sum += x[i];                                                                                              \
            squares += (double)x[i] * (double)x[i];                                                                   \
            low = x[i] < low ? x[i] : low;                                                                            \
            high = x[i] > high ? x[i] : high;                                                                         \
        }                                                                                                             \
        out->sum = sum;                                                                                               \
        out->mean = sum / n;                                                                                          \
        out->squares = squares;                                                                                       \
        out->spread = out->nans || out->infs ? NAN : INFINITY;                                                        \
        out->low = out->nans ? NAN : low;                                                                             \
        out->high = out->nans ? NAN : high;                                                                           \
    }

NOT_FINITE(of_floats, float)
MEASURE_BLOCK(of_floats, float, 0)
NOT_FINITE(of_doubles, double)
MEASURE_BLOCK(of_doubles, double, 1)

static void from_bfloat16(const uint16_t *x, int n, float *out)
{
    uint32_t bits[BLOCK_OF_HALVES];
    for (int i = 0; i < n; i++)
        bits[i] = (uint32_t)x[i] << 16;
    memcpy(out, bits, (size_t)n * sizeof *out);
}

static void from_float16(const uint16_t *x, int n, float *out)
{
    uint32_t bits[BLOCK_OF_HALVES];
    for (int i = 0; i < n; i++) {
        uint32_t sign = (uint32_t)(x[i] & 0x8000) << 16, rest = x[i] & 0x7fff;
        uint32_t normal = (rest << 13) + ((127 - 15) << 23);
        normal += rest >= 0x7c00 ? (uint32_t)(127 - 15) << 23 : 0; /* infinity and NaN */
        float tiny = (float)(int32_t)rest * 0x1p-24f;                  /* subnormal: a multiple of the smallest */
        uint32_t tiny_bits;
        memcpy(&tiny_bits, &tiny, sizeof tiny);
        bits[i] = sign | (rest < 0x400 ? tiny_bits : normal);
    }
    memcpy(out, bits, (size_t)n * sizeof *out);
}

/* ---- a tensor ------------------------------------------------------------------------------------------------- */

typedef enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 } Kind;

static const int bytes_of[] = {4, 8, 2, 2};

/* Merge two sets of moments: Chan, Golub and LeVeque 1983. */
static void add(Moments *all, const Moments *more)
{
    double n = all->n + more->n, delta = more->mean - all->mean;
    all->spread += more->spread + delta * delta * (all->n * more->n / n);
    all->mean += delta * (more->n / n);
    all->n = n;
    all->sum += more->sum;
    all->squares += more->squares;
    all->absolute += more->absolute;
    all->low = all->low != all->low || all->low < more->low ? all->low : more->low;
    all->high = all->high != all->high || all->high > more->high ? all->high : more->high;
    all->zeros += more->zeros;
    all->nans += more->nans;
    all->infs += more->infs;
}

static void measure_part(const char *data, Kind kind, int64_t n, int flags, Moments *out)
{
    int block = bytes_of[kind] == 2 ? BLOCK_OF_HALVES : BLOCK;
    for (int64_t at = 0; at < n; at += block) {
        int size = n - at < block ? (int)(n - at) : block;
        const char *x = data + at * bytes_of[kind];
        float converted[BLOCK_OF_HALVES];
        Moments of_block;
        Moments *found = at ? &of_block : out;
        switch (kind) {
        case FLOAT32: of_floats((const float *)x, size, flags, found); break;
        case FLOAT64: of_doubles((const double *)x, size, flags, found); break;
        case FLOAT16:
            from_float16((const uint16_t *)x, size, converted);
            of_floats(converted, size, flags, found);
            break;
        case BFLOAT16:
            from_bfloat16((const uint16_t *)x, size, converted);
            of_floats(converted, size, flags, found);
            break;
        }
        if (at)
            add(out, &of_block);
    }
}

/* A tensor that several threads measure: each takes the next share of its parts until none is left. */
typedef struct {
    const char *data;
    Kind kind;
    int64_t n;
    int flags;
    int64_t parts;
    int shares, next; /* next: the first share that no thread has taken */
    Moments *of_parts;
} Work;

static void measure_shares(void *given)
{
    Work *work = given;
    for (;;) {
        int64_t share = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (share >= work->shares)
            return;
        int64_t last = work->parts * (share + 1) / work->shares;
        for (int64_t part = work->parts * share / work->shares; part < last; part++) {
            int64_t at = part * PART, left = work->n - at;
            const char *x = work->data + at * bytes_of[work->kind];
            measure_part(x, work->kind, left < PART ? left : PART, work->flags, work->of_parts + part);
        }
    }
}

static void *in_thread(void *given)
{
    measure_shares(given);
    return NULL;
}

/* GCC's OpenMP function GOMP_parallel: runs a task in all threads of the caller's pool and waits for them.

   threads: how many; 0: all threads of torch. A smaller number would end the other threads of the pool */
typedef void (*Parallel)(void (*task)(void *), void *data, unsigned threads, unsigned flags);

/* Which threads measure large tensors.

   most:     the most threads to use
   parallel: runs a task in torch's own threads. These spin for a while after each operation of torch, so that other
             threads would compete with them for a core. NULL: new threads are started
   process:  the process that has that pool; a process forked from it does not have the threads */
typedef struct {
    int most;
    Parallel parallel;
    pid_t process;
} Threads;

/* The least number of parts per thread: for threads of the pool, and for new threads. */
enum { PARTS_OF_A_THREAD = 1, PARTS_OF_A_NEW_THREAD = 4, MOST_NEW_THREADS = 64 };

static void measure_in_new_threads(Work *work)
{
    pthread_t started[MOST_NEW_THREADS];
    int count = 0;
    while (count < work->shares - 1 && !pthread_create(started + count, NULL, in_thread, work))
        count++;
    measure_shares(work);
    while (count)
        pthread_join(started[--count], NULL);
}

static void measure_in_threads(Work *work, const Threads *threads)
{
    int pooled = threads->parallel && threads->process == getpid();
    int64_t shares = work->parts / (pooled ? PARTS_OF_A_THREAD : PARTS_OF_A_NEW_THREAD);
    if (!pooled && shares > MOST_NEW_THREADS)
        shares = MOST_NEW_THREADS;
    if (shares > threads->most)
        shares = threads->most;
    work->shares = shares > 1 ? (int)shares : 1;
    if (work->shares == 1)
        measure_shares(work);
    else if (pooled)
        threads->parallel(measure_shares, work, 0, 0);
    else
        measure_in_new_threads(work);
}

/* Measure n elements. Returns 0 if there is not enough memory. */
static int measure(const char *data, Kind kind, int64_t n, int flags, const Threads *threads, Moments *out)
{
    int64_t parts = (n + PART - 1) / PART;
    if (parts <= 1) {
        measure_part(data, kind, n, flags, out);
        return 1;
    }
    Moments *of_parts = malloc((size_t)parts * sizeof *of_parts);
    if (!of_parts)
        return 0;
    Work work = {data, kind, n, flags, parts, 1, 0, of_parts};
    measure_in_threads(&work, threads);
    *out = of_parts[0];
    for (int64_t part = 1; part < parts; part++)
        add(out, of_parts + part);
    free(of_parts);
    return 1;
}

/* The number of elements if they fill one block of memory without gaps, in any order of dimensions; else 0. */
static int64_t dense(const DLTensor *x)
{
    int64_t n = 1;
    int in_order = 1;
    for (int dim = x->ndim - 1; dim >= 0; dim--) {
        in_order &= x->shape[dim] == 1 || x->strides[dim] == n;
        n *= x->shape[dim];
    }
    if (in_order || n == 0)
        return n;
    int64_t expected = 1;
    while (expected < n) {
        int found = 0;
        for (int dim = 0; dim < x->ndim && !found; dim++)
            if (x->shape[dim] > 1 && x->strides[dim] == expected) {
                expected *= x->shape[dim];
                found = 1;
            }
        if (!found)
            return 0;
    }
    return n;
}

static int kind_of(const DLTensor *x, Kind *kind)
{
    if (x->dtype.lanes != 1)
        return 0;
    if (x->dtype.code == BFLOAT && x->dtype.bits == 16)
        *kind = BFLOAT16;
    else if (x->dtype.code == FLOAT && x->dtype.bits == 32)
        *kind = FLOAT32;
    else if (x->dtype.code == FLOAT && x->dtype.bits == 64)
        *kind = FLOAT64;
    else if (x->dtype.code == FLOAT && x->dtype.bits == 16)
        *kind = FLOAT16;
    else
        return 0;
    return 1;
}

/* ---- for Python ----------------------------------------------------------------------------------------------- */

typedef enum { MEAN, STD, VAR, MIN, MAX, NORM, ABS_MEAN, ABS_MAX, SUM, ZEROS, NANS, INFS, BYTES, NUMEL } Statistic;

enum { MOST_STATISTICS = 64, OF_A_FIRING = 4 };
enum { LONG = 1 << 16 }; /* elements from which the GIL is released while measuring */

/* What one function measures.

   keys:    the keys of a record: mode, epoch, step and call, then the names of the statistics
   start:   a record with all its keys, and the values that are the same at every firing
   pending: a list of lists that hold one record each; most: its length above which `recorded` returns False */
typedef struct {
    const Exchange *exchange;
    PyObject *tensor, *parameter; /* torch.Tensor and nn.Parameter, which are never freed */
    int count, flags;
    Threads threads;
    unsigned char wanted[MOST_STATISTICS];
    PyObject *keys, *start, *pending;
    ptrdiff_t most;
} Wanted;

static PyObject *number(double value, Kind kind)
{
    return PyFloat_FromDouble(kind == FLOAT64 ? value : (double)(float)value);
}

static PyObject *statistic(int name, const Moments *found, Kind kind)
{
    double n = found->n;
    double spread = found->spread <= 0 ? 0 : found->spread, squares = found->squares <= 0 ? 0 : found->squares;
    switch ((Statistic)name) {
    case MEAN: return number((double)(found->sum / n), kind);
    case STD: return number(sqrt(spread / (n - 1)), kind);
    case VAR: return number(spread / (n - 1), kind);
    case MIN: return number(found->low, kind);
    case MAX: return number(found->high, kind);
    case NORM: return number(sqrt(squares), kind);
    case ABS_MEAN: return number(found->absolute / n, kind);
    case ABS_MAX: return number(found->nans ? NAN : fmax(found->high, -found->low), kind);
    case SUM: return number((double)found->sum, kind);
    case ZEROS: return number((double)found->zeros / n, kind);
    case NANS: return PyLong_FromLongLong(found->nans);
    case INFS: return PyLong_FromLongLong(found->infs);
    case BYTES: return PyLong_FromLongLong((int64_t)n * bytes_of[kind]);
    case NUMEL: return PyLong_FromLongLong((int64_t)n);
    }
    return NULL;
}

static PyObject *given(PyObject *object)
{
    Py_IncRef(object);
    return object;
}

/* Measure a CPU tensor of at least two elements. Returns 0 for any other object, which torch has to measure. */
static int look(const Wanted *wanted, PyObject *object, Kind *kind, Moments *found)
{
    PyObject *type = PyObject_Type(object);
    Py_DecRef(type);
    if (type != wanted->tensor && type != wanted->parameter)
        return 0;
    DLTensor x;
    if (wanted->exchange->from_object(object, &x)) {
        PyErr_Clear();
        return 0;
    }
    if (x.device.type != CPU || !x.data || !kind_of(&x, kind))
        return 0;
    /* A tensor of one element may be the imaginary part of a conjugate, whose sign is a flag of the tensor. With
       several elements such a tensor has gaps. */
    int64_t n = dense(&x);
    if (n < 2)
        return 0;
    const char *data = (const char *)x.data + x.byte_offset;
    if (n < LONG)
        return measure(data, *kind, n, wanted->flags, &wanted->threads, found);
    void *state = PyEval_SaveThread();
    int done = measure(data, *kind, n, wanted->flags, &wanted->threads, found);
    PyEval_RestoreThread(state);
    return done;
}

static PyObject *measured(PyObject *self, PyObject *const *arguments, ptrdiff_t count)
{
    const Wanted *wanted = PyCapsule_GetPointer(self, NULL);
    Kind kind;
    Moments found;
    if (!wanted || count != 1 || !look(wanted, arguments[0], &kind, &found))
        return given(&_Py_NoneStruct);
    PyObject *values = PyTuple_New(wanted->count);
    for (int place = 0; values && place < wanted->count; place++)
        PyTuple_SetItem(values, place, statistic(wanted->wanted[place], &found, kind));
    return values;
}

/* Set a value of a record and release the reference to it. Returns 0 if there is not enough memory. */
static int put(PyObject *record, PyObject *key, PyObject *value)
{
    int done = value && !PyDict_SetItem(record, key, value);
    if (value)
        Py_DecRef(value);
    return done;
}

static PyObject *make_record(const Wanted *wanted, PyObject *const *firing, const Moments *found, Kind kind)
{
    PyObject *record = PyDict_Copy(wanted->start);
    int done = record != NULL;
    for (int place = 0; done && place < OF_A_FIRING; place++)
        done = !PyDict_SetItem(record, PyTuple_GetItem(wanted->keys, place), firing[place]);
    for (int place = 0; done && place < wanted->count; place++) {
        PyObject *key = PyTuple_GetItem(wanted->keys, OF_A_FIRING + place);
        done = put(record, key, statistic(wanted->wanted[place], found, kind));
    }
    if (done)
        return record;
    if (record)
        Py_DecRef(record);
    return NULL;
}

/* Append a record. Arguments: the tensor, then its mode, epoch, step and call. */
static PyObject *recorded(PyObject *self, PyObject *const *arguments, ptrdiff_t count)
{
    const Wanted *wanted = PyCapsule_GetPointer(self, NULL);
    Kind kind;
    Moments found;
    if (!wanted || count != 1 + OF_A_FIRING || !look(wanted, arguments[0], &kind, &found))
        return given(&_Py_NoneStruct);
    PyObject *record = make_record(wanted, arguments + 1, &found, kind);
    if (!record)
        return NULL;
    PyObject *waiting = PyList_New(1);
    if (!waiting) {
        Py_DecRef(record);
        return NULL;
    }
    PyList_SetItem(waiting, 0, record);
    int failed = PyList_Append(wanted->pending, waiting);
    Py_DecRef(waiting);
    if (failed)
        return NULL;
    return given(PyList_Size(wanted->pending) > wanted->most ? &_Py_FalseStruct : &_Py_TrueStruct);
}

static PyMethodDef of_a_tensor = {"measured", measured, METH_FASTCALL, "The statistics of a tensor, or None."};
static PyMethodDef of_a_firing = {"recorded", recorded, METH_FASTCALL, "Whether a record was made; None: it was not."};

static void release(PyObject *capsule)
{
    Wanted *wanted = PyCapsule_GetPointer(capsule, NULL);
    PyObject *held[] = {wanted->keys, wanted->start, wanted->pending};
    for (int each = 0; each < 3; each++)
        if (held[each])
            Py_DecRef(held[each]);
    free(wanted);
}

/* A Python function for the statistics of a tensor. NULL: not enough memory; None: another version of DLPack.

   names:    the indexes of the statistics, `count` of them
   threads:  the number of threads for a large tensor, those of the pool of `parallel` if that is not NULL
   keys:     None: the function returns a tuple of them. A tuple: it appends a record to `pending`, see Wanted */
PyObject *measuring(const Exchange *exchange, PyObject *tensor, PyObject *parameter, const unsigned char *names,
                    int count, int threads, Parallel parallel, PyObject *keys, PyObject *start, PyObject *pending,
                    ptrdiff_t most)
{
    if (exchange->version.major != 1 || count > MOST_STATISTICS)
        return given(&_Py_NoneStruct);
    Wanted *wanted = calloc(1, sizeof *wanted);
    if (!wanted)
        return given(&_Py_NoneStruct);
    wanted->exchange = exchange;
    wanted->tensor = tensor;
    wanted->parameter = parameter;
    wanted->count = count;
    Threads chosen = {threads, parallel, getpid()};
    wanted->threads = chosen;
    for (int place = 0; place < count; place++) {
        wanted->wanted[place] = names[place];
        wanted->flags |= names[place] == ABS_MEAN ? WITH_ABSOLUTE : 0;
        wanted->flags |= names[place] == ZEROS ? WITH_ZEROS : 0;
    }
    int records = keys != &_Py_NoneStruct;
    if (records) {
        wanted->keys = given(keys);
        wanted->start = given(start);
        wanted->pending = given(pending);
        wanted->most = most;
    }
    PyObject *capsule = PyCapsule_New(wanted, NULL, release);
    if (!capsule)
        return NULL;
    PyObject *function = PyCFunction_NewEx(records ? &of_a_firing : &of_a_tensor, capsule, NULL);
    Py_DecRef(capsule);
    return function;
}
