/* Tiles of products, for one instruction set; included once for each.

   The includer defines NAME(x), TARGET, VEC, WIDTH, ZERO, LOAD(p), STORE(p, v), FMA(a, b, c),
   MUL(a, b), SPREAD(x), KEEP(v) and SUM_4(a, b, c, d). A tile is some rows of x by some rows or
   vectors of w; all their sums stay in registers over one stretch of k.

   Invariant: an element's additions come in the same order in every tile and however k is cut, so
   the result does not depend on how many rows there are, nor on how they are cut. */

#define INLINE static inline __attribute__((always_inline)) TARGET

/* Add `count` sums that lie side by side to what is in a row of c. */
static TARGET __attribute__((noinline, cold)) void
NAME(put_on)(float *c, four sums, float alpha, float beta, int count)
{
    for (int j = 0; j < count; j++)
        c[j] = __builtin_fmaf(beta, c[j], alpha * sums[j]);
}

/* Add a vector's length of each row: what is used less often waits in registers. KEEP hinders the
   compiler from reading a vector from memory again for every use: the loads would be the limit. */
INLINE void NAME(add)(VEC sums[TALL][WIDE], const float *x, const float *w, long ldb,
                      const int tall, const int wide)
{
    if (tall < wide) {
        VEC rows[TALL];
        UNROLLED for (int i = 0; i < tall; i++)
            rows[i] = LOAD(x + i * WIDTH);
        UNROLLED for (int j = 0; j < wide; j++) {
            VEC one = LOAD(w + j * ldb);
            KEEP(one);
            UNROLLED for (int i = 0; i < tall; i++)
                sums[i][j] = FMA(one, rows[i], sums[i][j]);
        }
        return;
    }
    VEC columns[WIDE];
    UNROLLED for (int j = 0; j < wide; j++)
        columns[j] = LOAD(w + j * ldb);
    UNROLLED for (int i = 0; i < tall; i++) {
        VEC one = LOAD(x + i * WIDTH);
        KEEP(one);
        UNROLLED for (int j = 0; j < wide; j++)
            sums[i][j] = FMA(columns[j], one, sums[i][j]);
    }
}

INLINE void NAME(begin)(VEC sums[TALL][WIDE], const struct tile *t, const int tall, const int wide)
{
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++)
            sums[i][j] = t->k == 0 ? ZERO : LOAD(t->sums + (i * wide + j) * WIDTH);
}

INLINE void NAME(interrupt)(VEC sums[TALL][WIDE], const struct tile *t, const int tall,
                            const int wide)
{
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++)
            STORE(t->sums + (i * wide + j) * WIDTH, sums[i][j]);
}

/* Lay rows of x from m on side by side, vector by vector, with zeros at the end. */
static TARGET void NAME(lay)(const struct product *p, float *x, long m, long tall)
{
    long rest = p->k % WIDTH, whole = p->k - rest;
    for (long i = 0; i < tall; i++, x += WIDTH) {
        const float *row = p->a + (m + i) * p->lda;
        for (long k = 0; k < whole; k += WIDTH)
            STORE(x + k * tall, LOAD(row + k));
        if (rest != 0) {
            float last[WIDTH] = {0};
            memcpy(last, row + whole, rest * sizeof *row);
            STORE(x + whole * tall, LOAD(last));
        }
    }
}

/* x @ w.T: `tall` rows of x by `wide` rows of w; vectors lie along k. */
INLINE void NAME(dots)(const struct product *p, const struct tile *t, const int tall,
                       const int wide)
{
    VEC sums[TALL][WIDE];
    const float *x = t->x, *w = p->b + t->n * p->ldb + t->k;
    long k = 0, rest = t->length % WIDTH;
    const int near = wide * t->length <= NEAR, run = near && p->length >= p->ldb;
    const float *next = near ? w + wide * p->ldb : w + AHEAD; /* the next tile's, or a row's own */
    const long along = run ? wide : 1, across = run ? WIDTH : p->ldb;
    NAME(begin)(sums, t, tall, wide);
    for (; k < t->length - rest; k += WIDTH, x += tall * WIDTH) {
        UNROLLED for (int j = 0; j < wide; j++)
            __builtin_prefetch(next + j * across + k * along);
        NAME(add)(sums, x, w + k, p->ldb, tall, wide);
    }
    if (rest != 0) {
        float last[WIDE][WIDTH] = {0};
        UNROLLED for (int j = 0; j < wide; j++)
            memcpy(last[j], w + j * p->ldb + k, rest * sizeof *w);
        NAME(add)(sums, x, last[0], WIDTH, tall, wide);
    }
    if (t->k + t->length < p->k) {
        NAME(interrupt)(sums, t, tall, wide);
        return;
    }
    const float alpha = p->alpha, beta = p->beta; /* read once: c may be anywhere */
    const long ldc = p->ldc;
    float *c = p->c + t->m * ldc + t->n;
    UNROLLED for (int i = 0; i < tall; i++, c += ldc)
        UNROLLED for (int j = 0; j < wide; j += 4) {
            const int count = wide - j < 4 ? wide - j : 4;
            four made = SUM_4(sums[i][j], count > 1 ? sums[i][j + 1] : ZERO,
                              count > 2 ? sums[i][j + 2] : ZERO,
                              count > 3 ? sums[i][j + 3] : ZERO);
            if (beta != 0.0f) {
                NAME(put_on)(c + j, made, alpha, beta, count);
                continue;
            }
            made *= alpha;
            memcpy(c + j, &made, count * sizeof *c);
        }
}

/* x @ w: `tall` rows of x by `wide` vectors of columns of w. */
INLINE void NAME(axes)(const struct product *p, const struct tile *t, const int tall,
                       const int wide)
{
    VEC sums[TALL][WIDE];
    const float *x = p->a + t->m * p->lda + t->k, *w = p->b + t->k * p->ldb + t->n;
    NAME(begin)(sums, t, tall, wide);
    for (long k = 0; k < t->length; k++, x++, w += p->ldb) {
        VEC columns[WIDE];
        UNROLLED for (int j = 0; j < wide; j++)
            columns[j] = LOAD(w + j * WIDTH);
        UNROLLED for (int i = 0; i < tall; i++) {
            VEC one = SPREAD(x[i * p->lda]);
            KEEP(one);
            UNROLLED for (int j = 0; j < wide; j++)
                sums[i][j] = FMA(columns[j], one, sums[i][j]);
        }
    }
    if (t->k + t->length < p->k) {
        NAME(interrupt)(sums, t, tall, wide);
        return;
    }
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++) {
            float *c = p->c + (t->m + i) * p->ldc + t->n + j * WIDTH;
            VEC sum = MUL(SPREAD(p->alpha), sums[i][j]);
            STORE(c, p->beta == 0.0f ? sum : FMA(SPREAD(p->beta), LOAD(c), sum));
        }
}

/* x @ w: one element, in the order of `axes`. */
static TARGET void NAME(column)(const struct product *p, long m, long n)
{
    float sum = 0.0f, *c = p->c + m * p->ldc + n;
    for (long k = 0; k < p->k; k++)
        sum = __builtin_fmaf(p->b[k * p->ldb + n], p->a[m * p->lda + k], sum);
    *c = p->beta == 0.0f ? p->alpha * sum : __builtin_fmaf(p->beta, *c, p->alpha * sum);
}

#define TILE(tall, wide) \
    static TARGET void NAME(dots_##tall##x##wide)(const struct product *p, const struct tile *t) \
    { NAME(dots)(p, t, tall, wide); } \
    static TARGET void NAME(axes_##tall##x##wide)(const struct product *p, const struct tile *t) \
    { NAME(axes)(p, t, tall, wide); }
TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 8)
TILE(2, 1) TILE(2, 2) TILE(2, 4) TILE(2, 8)
TILE(3, 1) TILE(3, 2) TILE(3, 4) TILE(3, 8)
TILE(4, 1) TILE(4, 2) TILE(4, 4) TILE(4, 6)
TILE(5, 1) TILE(5, 2) TILE(5, 4)
TILE(6, 1) TILE(6, 2) TILE(6, 4)
TILE(7, 1) TILE(7, 3)
TILE(8, 1) TILE(8, 3)
#undef TILE
#undef INLINE
