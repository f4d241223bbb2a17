/* Tiles of products, for one instruction set; included once for each.

   The includer defines NAME(x), TARGET, VEC, WIDTH, ZERO, LOAD(p), STORE(p, v), FMA(a, b, c),
   SPREAD(x), SUM(v), and the tile's sizes: TALL (rows of x) by WIDE (rows or vectors of w), which
   all fit into the registers.

   Invariant: an element's additions come in the same order in every tile, so the result does not
   depend on how many rows there are, nor on how they are cut. */

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE void NAME(put)(const struct product *p, long m, long n, float sum)
{
    float *c = p->c + m * p->ldc + n;
    *c = p->beta == 0.0f ? p->alpha * sum : __builtin_fmaf(p->beta, *c, p->alpha * sum);
}

/* x @ w.T: `tall` rows of x from m on by `wide` rows of w from n on; vectors lie along k. */
INLINE void NAME(dots)(const struct product *p, long m, long n, const int tall, const int wide)
{
    VEC sums[TALL][WIDE_ONE];
    const float *a = p->a + m * p->lda, *b = p->b + n * p->ldb;
    long k = 0;
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++)
            sums[i][j] = ZERO;
    for (; k + WIDTH <= p->k; k += WIDTH) {
        VEC x[TALL];
        UNROLLED for (int i = 0; i < tall; i++)
            x[i] = LOAD(a + i * p->lda + k);
        UNROLLED for (int j = 0; j < wide; j++) {
            VEC w = LOAD(b + j * p->ldb + k);
            __builtin_prefetch(b + j * p->ldb + k + AHEAD);
            UNROLLED for (int i = 0; i < tall; i++)
                sums[i][j] = FMA(w, x[i], sums[i][j]);
        }
    }
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++) {
            float sum = SUM(sums[i][j]);
            for (long q = k; q < p->k; q++)
                sum = __builtin_fmaf(b[j * p->ldb + q], a[i * p->lda + q], sum);
            NAME(put)(p, m + i, n + j, sum);
        }
}

/* x @ w: `tall` rows of x from m on by `wide` vectors of columns of w from n on. */
INLINE void NAME(axes)(const struct product *p, long m, long n, const int tall, const int wide)
{
    VEC sums[TALL][WIDE_ONE];
    const float *a = p->a + m * p->lda, *b = p->b + n;
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++)
            sums[i][j] = ZERO;
    for (long k = 0; k < p->k; k++) {
        const float *row = b + k * p->ldb;
        VEC w[WIDE_ONE];
        UNROLLED for (int j = 0; j < wide; j++)
            w[j] = LOAD(row + j * WIDTH);
        UNROLLED for (int i = 0; i < tall; i++) {
            VEC x = SPREAD(a[i * p->lda + k]);
            UNROLLED for (int j = 0; j < wide; j++)
                sums[i][j] = FMA(w[j], x, sums[i][j]);
        }
    }
    UNROLLED for (int i = 0; i < tall; i++)
        UNROLLED for (int j = 0; j < wide; j++) {
            float *c = p->c + (m + i) * p->ldc + n + j * WIDTH;
            VEC sum = MUL(SPREAD(p->alpha), sums[i][j]);
            STORE(c, p->beta == 0.0f ? sum : FMA(SPREAD(p->beta), LOAD(c), sum));
        }
}

INLINE void NAME(column)(const struct product *p, long m, long n)
{
    float sum = 0.0f;
    for (long k = 0; k < p->k; k++)
        sum = __builtin_fmaf(p->b[k * p->ldb + n], p->a[m * p->lda + k], sum);
    NAME(put)(p, m, n, sum);
}

#define DOTS(tall, wide) \
    static TARGET void NAME(dots_##tall##x##wide)(const struct product *p, long m, long n) \
    { NAME(dots)(p, m, n, tall, wide); }
#define AXES(tall, wide) \
    static TARGET void NAME(axes_##tall##x##wide)(const struct product *p, long m, long n) \
    { NAME(axes)(p, m, n, tall, wide); }
DOTS(1, 1) DOTS(1, 2) DOTS(1, 4) DOTS(1, 8)
DOTS(2, 1) DOTS(2, 2) DOTS(2, 4) DOTS(2, 8)
DOTS(3, 1) DOTS(3, 2) DOTS(3, 4)
DOTS(4, 1) DOTS(4, 2) DOTS(4, 4)
AXES(1, 1) AXES(1, 2) AXES(1, 4) AXES(1, 8)
AXES(2, 1) AXES(2, 2) AXES(2, 4) AXES(2, 8)
AXES(3, 1) AXES(3, 2) AXES(3, 4)
AXES(4, 1) AXES(4, 2) AXES(4, 4)
#undef DOTS
#undef AXES
#undef INLINE
