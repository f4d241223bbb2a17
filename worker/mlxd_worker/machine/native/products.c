/* cblas_sgemm for few rows, made to take the time in which memory gives the weights.

   Stands in front of an OpenBLAS, which computes whatever is not for here: more rows, transposed
   rows, columns first, other types. Each weight is read once from memory and meets all rows in
   registers or the cache. Built without -march: the instruction set is chosen as the library starts.

   Invariants
   - A row's result is the same bit for bit whatever other rows there are, up to `rows_max(k)` in
     all, and whatever the number of threads.
   - beta = 0 writes c without reading it; alpha = 0 and k = 0 are OpenBLAS's. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define LONG_K 8192         /* rows of x longer than this leave the cache when there are many */
#define LONG_ROWS_MAX 16
#define AHEAD 256           /* floats of a row of weights that are asked for in advance */
#define PART_BYTES 65536    /* of weights: what a thread claims at once, at least */
#define SHARED_BYTES 524288 /* of weights, from where a second thread pays */
#define SHARED_STEPS 2097152 /* multiplications, likewise */
#define UNROLLED _Pragma("GCC unroll 8")
#define TALL 4
#define WIDE_ONE 8

enum { ROW_MAJOR = 101, AS_IS = 111, TRANSPOSED = 112 };

struct product {
    long m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    long lda, ldb, ldc;
    int transposed;
    long step; /* columns of c in a part */
};

typedef void tile_fn(const struct product *p, long m, long n);
struct tiles {
    const char *name;
    int rows_max; /* from where OpenBLAS is as fast */
    int width;    /* floats in a vector */
    int tall;     /* rows that fit into registers beside four of w */
    int wide[5];  /* by number of rows: the most of w beside them */
    tile_fn *dots[5][4], *axes[5][4]; /* by number of rows, and logarithm of width */
    tile_fn *column;
};

typedef void sgemm_fn(int, int, int, int, int, int, float, const float *, int, const float *, int,
                      float, float *, int);
static sgemm_fn *next_sgemm;
static const struct tiles *tiles;
static _Atomic int off;

#define ROW(kind, tall, isa) {kind##_##tall##x1_##isa, kind##_##tall##x2_##isa, kind##_##tall##x4_##isa}
#define LONG_ROW(kind, tall, isa) \
    {kind##_##tall##x1_##isa, kind##_##tall##x2_##isa, kind##_##tall##x4_##isa, kind##_##tall##x8_##isa}
#define ROWS(kind, isa) \
    {{0}, LONG_ROW(kind, 1, isa), LONG_ROW(kind, 2, isa), ROW(kind, 3, isa), ROW(kind, 4, isa)}
#define TABLE(isa, most, floats, ...) \
    static const struct tiles isa = { \
        #isa, most, floats, __VA_ARGS__, ROWS(dots, isa), ROWS(axes, isa), column_##isa}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define VEC __m256
#define WIDTH 8
#define ZERO _mm256_setzero_ps()
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define SPREAD(x) _mm256_set1_ps(x)
#define SUM(v) sum_of_8(v)
static inline TARGET float sum_of_8(__m256 v)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
#include "tiles.h"
TABLE(avx2, 32, 8, 3, {0, 8, 4, 4, 2});
#undef NAME
#undef TARGET
#undef VEC
#undef WIDTH
#undef ZERO
#undef LOAD
#undef STORE
#undef FMA
#undef MUL
#undef SPREAD
#undef SUM
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512dq,avx2,fma")))
#define VEC __m512
#define WIDTH 16
#define ZERO _mm512_setzero_ps()
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define SPREAD(x) _mm512_set1_ps(x)
#define SUM(v) sum_of_16(v)
static inline TARGET float sum_of_16(__m512 v)
{
    return sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
#include "tiles.h"
TABLE(avx512, 32, 16, 4, {0, 8, 8, 4, 4});
#elif defined(__aarch64__)
#include <arm_neon.h>
#define NAME(x) x##_neon
#define TARGET
#define VEC float32x4_t
#define WIDTH 4
#define ZERO vdupq_n_f32(0.0f)
#define LOAD(p) vld1q_f32(p)
#define STORE(p, v) vst1q_f32(p, v)
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#define MUL(a, b) vmulq_f32(a, b)
#define SPREAD(x) vdupq_n_f32(x)
#define SUM(v) vaddvq_f32(v)
#include "tiles.h"
TABLE(neon, 16, 4, 4, {0, 8, 8, 4, 4});
#endif

#if defined(__x86_64__)
/* Say whether there are AVX2 with FMA, and AVX-512 with its F and DQ, and whether the operating
   system keeps their registers (CPUID and XGETBV, Intel's manual, volume 1, 14.3 and 15.2). Not by
   __builtin_cpu_supports: what ziglang 0.17 links for that denies everything. */
static void ask_processor(int here[2])
{
    const unsigned fma_xsave_avx = 1u << 12 | 1u << 27 | 1u << 28, avx2_bit = 1u << 5;
    const unsigned avx512_bits = 1u << 16 | 1u << 17, ymm = 0x06, zmm = 0xe6;
    unsigned a, b, c, d, kept, upper;
    here[0] = here[1] = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & fma_xsave_avx) != fma_xsave_avx)
        return;
    __asm__ volatile("xgetbv" : "=a"(kept), "=d"(upper) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return;
    here[0] = (kept & ymm) == ymm && (b & avx2_bit) != 0;
    here[1] = here[0] && (kept & zmm) == zmm && (b & avx512_bits) == avx512_bits;
}
#endif

/* Return the tiles of an instruction set, of the best one for "", or none where it is not here. */
static const struct tiles *tiles_for(const char *name)
{
    const struct tiles *best = NULL, *named = NULL;
#if defined(__x86_64__)
    const struct tiles *all[] = {&avx2, &avx512};
    int here[2];
    ask_processor(here);
#elif defined(__aarch64__)
    const struct tiles *all[] = {&neon};
    int here[] = {1};
#endif
    for (size_t i = 0; i < sizeof here / sizeof *here; i++)
        if (here[i]) {
            best = all[i];
            if (strcmp(name, best->name) == 0)
                named = best;
        }
    return *name ? named : best;
}

/* Compute columns [n, end) of c for rows [m, m + tall). */
static void run_block(const struct product *p, long m, long tall, long n, long end)
{
    int unit = p->transposed ? 1 : tiles->width, power = 3;
    tile_fn *const *of = p->transposed ? tiles->dots[tall] : tiles->axes[tall];
    for (int wide = WIDE_ONE; wide > 0; wide /= 2, power--)
        if (wide <= tiles->wide[tall])
            for (; n + wide * unit <= end; n += wide * unit)
                of[power](p, m, n);
    for (; n < end; n++)
        for (long i = m; i < m + tall; i++)
            tiles->column(p, i, n);
}

/* Compute a part: so much of w at a time as one tile takes, for all rows. */
static void run_part(void *job, int part)
{
    const struct product *p = job;
    long n = part * p->step, end = n + p->step < p->n ? n + p->step : p->n;
    long blocks = (p->m + tiles->tall - 1) / tiles->tall;
    long wide = tiles->wide[(p->m + blocks - 1) / blocks] * (p->transposed ? 1 : tiles->width);
    for (; n < end; n += wide) {
        long m = 0, until = n + wide < end ? n + wide : end;
        for (long left = blocks; left > 0; left--) {
            long tall = (p->m - m + left - 1) / left;
            run_block(p, m, tall, n, until);
            m += tall;
        }
    }
}

static void multiply(struct product *p)
{
    long grain = WIDE_ONE * (p->transposed ? 1 : tiles->width);
    p->step = p->n;
    long weights = p->n * p->k;
    if ((weights * 4 >= SHARED_BYTES || weights * p->m >= SHARED_STEPS) && p->n > grain) {
        long columns = PART_BYTES / 4 / p->k;
        if (columns * 4 * pool.threads > p->n)
            columns = p->n / 4 / pool.threads;
        p->step = (columns / grain + 1) * grain;
    }
    pool_run(run_part, p, (int)((p->n + p->step - 1) / p->step));
}

static int rows_max(long k)
{
    return k > LONG_K && tiles->rows_max > LONG_ROWS_MAX ? LONG_ROWS_MAX : tiles->rows_max;
}

__attribute__((visibility("default"))) void
cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
            const float *b, int ldb, float beta, float *c, int ldc)
{
    int ours = tiles != NULL && !atomic_load(&off) && order == ROW_MAJOR && ta == AS_IS &&
               (tb == AS_IS || tb == TRANSPOSED) && m >= 1 && n >= 1 && k >= 1 &&
               m <= rows_max(k) && alpha != 0.0f && lda >= k && ldc >= n &&
               ldb >= (tb == TRANSPOSED ? k : n);
    if (!ours) {
        next_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    struct product product = {m, n, k, alpha, beta, a, b, c, lda, ldb, ldc, tb == TRANSPOSED, 0};
    multiply(&product);
}

/* Stand in front of `next`, with so many threads; run OpenBLAS's jobs on them too where `hand_over`
   is its openblas_set_threads_callback_function. Return the instruction set in use, or "" for none;
   OpenBLAS keeps its own threads then. */
__attribute__((visibility("default"))) const char *
mlxd_products_start(sgemm_fn *next, void (*hand_over)(blas_runner *), int threads, const char *isa)
{
    if (next_sgemm == NULL)
        pthread_atfork(before_fork, after_fork, after_fork_in_child);
    pool.threads = threads < 1 ? 1 : threads < THREADS_MAX ? threads : THREADS_MAX;
    next_sgemm = next;
    tiles = tiles_for(isa);
    if (hand_over != NULL && tiles != NULL)
        hand_over(pool_run_blas);
    return tiles == NULL ? "" : tiles->name;
}

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST ""
#endif
__attribute__((visibility("default"))) const char *mlxd_products_source(void)
{
    return SOURCE_DIGEST;
}

/* Return up to how many rows are computed here where each has `k` values, 0 for none. */
__attribute__((visibility("default"))) int mlxd_products_rows(long k)
{
    return tiles == NULL ? 0 : rows_max(k);
}

/* Give OpenBLAS its own threads back. */
__attribute__((visibility("default"))) void mlxd_products_stop(void (*hand_over)(blas_runner *))
{
    if (hand_over != NULL)
        hand_over(NULL);
}

/* Have OpenBLAS compute everything (1), or not (0). */
__attribute__((visibility("default"))) void mlxd_products_off(int value)
{
    atomic_store(&off, value);
}
