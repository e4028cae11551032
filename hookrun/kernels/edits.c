/* Several edits of one tensor in one pass through its memory, for hookrun/kernels/edits.py.

   The result is bit for bit what torch computes: each edit is a separate loop over a block that stays in the L1 cache,
   so that the compiler cannot fuse two operations into one with a single rounding. */

#include <pthread.h>
#include <stdint.h>

typedef enum { MULTIPLY, ADD, CLAMP } Operation;

typedef struct {
    int32_t operation;
    double first, second; /* a factor, a summand, or a lower and an upper bound */
} Edit;

enum { BLOCK = 2048, MOST_THREADS = 64, BLOCKS_OF_A_THREAD = 64 };

/* An element that is NaN or equals a bound (0 equals -0) is not changed. */
#define EDIT_RANGE(NAME, T)                                                                                           \
    static void NAME(const Edit *edits, int count, const T *given, T *out, int n)                                     \
    {                                                                                                                 \
        const T *x = given;                                                                                           \
        for (int each = 0; each < count; each++, x = out) {                                                           \
            const T first = (T)edits[each].first, second = (T)edits[each].second;                                     \
            switch ((Operation)edits[each].operation) {                                                               \
            case MULTIPLY:                                                                                            \
                _Pragma("omp simd") for (int i = 0; i < n; i++) out[i] = x[i] * first;                                \
                break;                                                                                                \
            case ADD:                                                                                                 \
                _Pragma("omp simd") for (int i = 0; i < n; i++) out[i] = x[i] + first;                                \
                break;                                                                                                \
            case CLAMP:                                                                                               \
                _Pragma("omp simd") for (int i = 0; i < n; i++)                                                       \
                {                                                                                                     \
                    T above = x[i] < first ? first : x[i];                                                            \
                    out[i] = second < above ? second : above;                                                         \
                }                                                                                                     \
                break;                                                                                                \
            }                                                                                                         \
        }                                                                                                             \
    }

EDIT_RANGE(edit_floats, float)
EDIT_RANGE(edit_doubles, double)

/* GCC's OpenMP function GOMP_parallel: runs a task in all threads of the caller's pool and waits for them. */
typedef void (*Parallel)(void (*task)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    const Edit *edits;
    int count, wide;
    const char *x;
    char *out;
    int64_t first, last; /* the range of elements, without `last` */
} Share;

static void *edit_share(void *given)
{
    const Share *share = given;
    for (int64_t at = share->first; at < share->last; at += BLOCK) {
        int n = share->last - at < BLOCK ? (int)(share->last - at) : BLOCK;
        if (share->wide)
            edit_doubles(share->edits, share->count, (const double *)share->x + at, (double *)share->out + at, n);
        else
            edit_floats(share->edits, share->count, (const float *)share->x + at, (float *)share->out + at, n);
    }
    return 0;
}

/* Any number of threads: each takes the next share until none is left. */
typedef struct {
    const Share *shares;
    int count, next;
} Work;

static void edit_shares(void *given)
{
    Work *work = given;
    int each;
    while ((each = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count)
        edit_share((void *)(work->shares + each));
}

static void edit_in_new_threads(Share *shares, int count)
{
    pthread_t started[MOST_THREADS];
    int running[MOST_THREADS] = {0};
    for (int each = 1; each < count; each++)
        running[each] = !pthread_create(started + each, 0, edit_share, shares + each);
    for (int each = 0; each < count; each++)
        if (!running[each])
            edit_share(shares + each);
    for (int each = 1; each < count; each++)
        if (running[each])
            pthread_join(started[each], 0);
}

/* Apply the edits to x, n elements of float64 (`wide`) or float32, and write the result into out, which may be x.

   threads:  the most threads to use
   parallel: runs a task in torch's own threads; 0: new threads are started */
void edit(const Edit *edits, int count, int wide, const char *x, char *out, int64_t n, int threads, Parallel parallel)
{
    Share shares[MOST_THREADS];
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    if (threads > blocks / BLOCKS_OF_A_THREAD)
        threads = (int)(blocks / BLOCKS_OF_A_THREAD);
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (threads < 1)
        threads = 1;
    for (int each = 0; each < threads; each++) {
        int64_t first = blocks * each / threads * BLOCK, last = blocks * (each + 1) / threads * BLOCK;
        Share share = {edits, count, wide, x, out, first, last < n ? last : n};
        shares[each] = share;
    }
    if (threads > 1 && parallel) {
        Work work = {shares, threads, 0};
        parallel(edit_shares, &work, 0, 0); /* 0: all threads; a smaller number would end threads of the pool */
    } else
        edit_in_new_threads(shares, threads);
}
