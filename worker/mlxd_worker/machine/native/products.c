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

#define GROUP 32            /* rows that share what a part has brought into the cache */
#define LONG_K 8192         /* rows of x longer than this leave the cache when there are many */
#define LONG_ROWS_MAX 16
#define X_WHOLE 8192        /* floats of a panel of x that is not cut: 32 KiB of the first cache */
#define X_WHOLE_ROWS 4      /* nor is one of so few rows: the second cache gives it fast enough */
#define X_FLOATS 4096       /* of one that is, at a time: sums come and go there as well */
#define NEAR 16384          /* floats of a tile after which the next one's are asked for in time */
#define AHEAD 256           /* floats of a row of w that are asked for in advance in longer ones */
#define SUMS_FLOATS 16384   /* of unfinished sums between two stretches of k */
#define PART_BYTES 262144   /* of weights: what a thread claims at once, unless k is long */
#define PART_COLUMNS 32     /* at least, for which x comes from further away once */
#define SHARED_BYTES 524288 /* of weights, from where a second thread pays */
#define SHARED_STEPS 2097152 /* multiplications, likewise */
#define THREAD_PARTS 4      /* at least, for each thread: the last one to end is waited for */
#define UNROLLED _Pragma("GCC unroll 8")
#define TALL 8
#define WIDE 8

enum { ROW_MAJOR = 101, AS_IS = 111, TRANSPOSED = 112 };

struct product {
    long m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    long lda, ldb, ldc;
    int transposed;
    long step;   /* columns of c in a part */
    long length; /* of k at a time */
    int shared;  /* by more than one thread */
    long padded; /* k, up to a vector's end */
    float *x;    /* the rows of a, panel after panel, each laid side by side (of dots) */
};

/* What a tile computes: rows from m on by columns from n on, over k to k + length. */
struct tile {
    long m, n, k, length;
    const float *x; /* its rows, laid side by side (of dots) */
    float *sums;    /* that another stretch of k began, and another will end */
};

typedef float four __attribute__((vector_size(16)));
typedef void tile_fn(const struct product *p, const struct tile *t);
struct size {
    int wide; /* rows of w, or vectors of its columns */
    tile_fn *dots, *axes;
};
struct tiles {
    const char *name;
    int rows_max; /* from where OpenBLAS is as fast */
    int width;    /* floats in a vector */
    int tall;     /* rows at most */
    struct size sizes[TALL + 1][5]; /* by number of rows, widest first, then none */
    void (*lay)(const struct product *p, float *x, long m, long tall);
    void (*column)(const struct product *p, long m, long n);
};

typedef void sgemm_fn(int, int, int, int, int, int, float, const float *, int, const float *, int,
                      float, float *, int);
static sgemm_fn *next_sgemm;
static const struct tiles *tiles;
static _Atomic int off;

/* As many as fit into the registers beside what is multiplied: 32 registers, and 16. */
#define SIZE(tall, wide, isa) {wide, dots_##tall##x##wide##_##isa, axes_##tall##x##wide##_##isa}
#define FOUR(tall, wide, isa) \
    {SIZE(tall, wide, isa), SIZE(tall, 4, isa), SIZE(tall, 2, isa), SIZE(tall, 1, isa)}
#define THREE(tall, isa) {SIZE(tall, 4, isa), SIZE(tall, 2, isa), SIZE(tall, 1, isa)}
#define TWO(tall, wide, isa) {SIZE(tall, wide, isa), SIZE(tall, 1, isa)}
#define SIZES_32(isa) \
    {{{0}}, FOUR(1, 8, isa), FOUR(2, 8, isa), FOUR(3, 8, isa), FOUR(4, 6, isa), THREE(5, isa), \
     THREE(6, isa), TWO(7, 3, isa), TWO(8, 3, isa)}
#define SIZES_16(isa) \
    {{{0}}, FOUR(1, 8, isa), THREE(2, isa), THREE(3, isa), TWO(4, 2, isa), TWO(5, 2, isa), \
     TWO(6, 2, isa)}

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
#define KEEP(v) __asm__("" : "+x"(v))
#define SUM_4(a, b, c, d) sums_of_8(a, b, c, d)
/* Add halves, then their halves, and so on, of four vectors at once. */
static inline TARGET four sums_of_8(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                              _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20),
                              _mm256_permute2f128_ps(c, d, 0x31));
    __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    all = _mm256_add_ps(_mm256_shuffle_ps(all, all, 0x88), _mm256_shuffle_ps(all, all, 0xdd));
    return (four)_mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
#include "tiles.h"
static const struct tiles avx2 = {"avx2", 32, 8, 6, SIZES_16(avx2), lay_avx2, column_avx2};
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
#undef KEEP
#undef SUM_4
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
#define KEEP(v) __asm__("" : "+v"(v))
#define SUM_4(a, b, c, d) sums_of_16(a, b, c, d)
static inline TARGET four sums_of_16(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                               _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    return (four)_mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all));
}
#include "tiles.h"
static const struct tiles avx512 = {
    "avx512", 48, 16, 8, SIZES_32(avx512), lay_avx512, column_avx512};
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
#define KEEP(v) __asm__("" : "+w"(v))
#define SUM_4(a, b, c, d) ((four)vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)))
#include "tiles.h"
static const struct tiles neon = {"neon", 16, 4, 8, SIZES_32(neon), lay_neon, column_neon};
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

static pthread_key_t scratch_key; /* frees a thread's as it ends */
static _Thread_local struct {
    float *numbers;
    long count;
} kept;

static long round_up(long count, long unit)
{
    return (count + unit - 1) / unit * unit;
}

/* Return room for so many numbers, the same for each product of a thread, or NULL. */
static float *scratch(long count)
{
    if (count > kept.count) {
        free(kept.numbers);
        kept.numbers = aligned_alloc(64, round_up(count * sizeof *kept.numbers, 64));
        kept.count = kept.numbers == NULL ? 0 : count;
        pthread_setspecific(scratch_key, kept.numbers);
    }
    return kept.numbers;
}

/* Return how many rows the panel at m has: those of a group are shared out evenly. */
static long panel_rows(const struct product *p, long m)
{
    long begin = m / GROUP * GROUP, rows = p->m - begin < GROUP ? p->m - begin : GROUP;
    long panels = (rows + tiles->tall - 1) / tiles->tall, done = m - begin;
    long small = rows / panels, tall_ones = rows % panels;
    return small + (done < tall_ones * (small + 1));
}

/* Compute columns [n, end) of c for a panel of x over a stretch of k. */
static void run_panel(const struct product *p, struct tile *tile, long tall, long end)
{
    long unit = p->transposed ? 1 : tiles->width, first = tile->n;
    tile->x = p->transposed ? p->x + tile->m * p->padded + tile->k * tall : NULL;
    for (const struct size *size = tiles->sizes[tall]; size->wide > 0; size++) {
        tile_fn *run = p->transposed ? size->dots : size->axes;
        for (; tile->n + size->wide * unit <= end; tile->n += size->wide * unit) {
            run(p, tile);
            tile->sums += tall * size->wide * tiles->width;
        }
    }
    for (; tile->k == 0 && tile->n < end; tile->n++)
        for (long i = tile->m; i < tile->m + tall; i++)
            tiles->column(p, i, tile->n);
    tile->n = first;
}

/* Compute a part. Its weights come into the second cache once, and meet the group's rows there
   panel after panel, each of which stays in the first cache for a stretch of k. */
static void run_part(void *job, int part)
{
    const struct product *p = job;
    _Alignas(64) float sums[SUMS_FLOATS];
    long n = part * p->step, end = n + p->step < p->n ? n + p->step : p->n, until;
    for (long begin = 0; begin < p->m; begin = until) {
        until = begin + GROUP < p->m ? begin + GROUP : p->m;
        for (long k = 0; k < p->k; k += p->length) {
            struct tile tile = {.m = begin, .n = n, .k = k, .sums = sums};
            tile.length = p->length < p->k - k ? p->length : p->k - k;
            for (long tall; tile.m < until; tile.m += tall) {
                tall = panel_rows(p, tile.m);
                run_panel(p, &tile, tall, end);
            }
        }
    }
}

/* Cut a product into parts: of so many columns that a part's weights fit into the second cache,
   its unfinished sums too, and that there are some for each thread. */
static void cut(struct product *p)
{
    long unit = p->transposed ? 1 : tiles->width, weights = p->n * p->k, tall = panel_rows(p, 0);
    long grain = tiles->sizes[tall][0].wide * unit, columns = PART_BYTES / 4 / p->k;
    long most = SUMS_FLOATS / (p->m < GROUP ? p->m : GROUP) / (tiles->width / unit);
    p->shared = weights * 4 >= SHARED_BYTES || weights * p->m >= SHARED_STEPS;
    p->padded = round_up(p->k, tiles->width);
    int whole = tall <= X_WHOLE_ROWS || tall * p->k <= X_WHOLE;
    long stretches = whole ? 1 : (tall * p->k + X_FLOATS - 1) / X_FLOATS;
    p->length = round_up((p->k + stretches - 1) / stretches, tiles->width);
    if (columns < PART_COLUMNS)
        columns = PART_COLUMNS;
    if (p->shared && columns * THREAD_PARTS * pool.threads > p->n)
        columns = p->n / THREAD_PARTS / pool.threads;
    if (columns > most)
        columns = most;
    p->step = columns < grain ? grain : columns / grain * grain;
}

/* Compute a product, or return 0 where there is no memory to lay x side by side. */
static int multiply(struct product *p)
{
    cut(p);
    if (p->transposed) {
        p->x = scratch(p->m * p->padded);
        if (p->x == NULL)
            return 0;
        for (long m = 0, tall; m < p->m; m += tall) {
            tall = panel_rows(p, m);
            tiles->lay(p, p->x + m * p->padded, m, tall);
        }
    }
    pool_run(run_part, p, (int)((p->n + p->step - 1) / p->step), p->shared);
    return 1;
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
    struct product product = {.m = m, .n = n, .k = k, .alpha = alpha, .beta = beta, .a = a, .b = b,
        .c = c, .lda = lda, .ldb = ldb, .ldc = ldc, .transposed = tb == TRANSPOSED};
    if (!ours || !multiply(&product))
        next_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* Stand in front of `next`, with so many threads; run OpenBLAS's jobs on them too where `hand_over`
   is its openblas_set_threads_callback_function. Return the instruction set in use, or "" for none;
   OpenBLAS keeps its own threads then. */
__attribute__((visibility("default"))) const char *
mlxd_products_start(sgemm_fn *next, void (*hand_over)(blas_runner *), int threads, const char *isa)
{
    if (next_sgemm == NULL) {
        pthread_atfork(before_fork, after_fork, after_fork_in_child);
        pthread_key_create(&scratch_key, free);
    }
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
