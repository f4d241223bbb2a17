/* The one pool of threads that all products of a process share.

   A job is a number of parts in order, cut into a range for each thread. A thread claims the parts
   of its own range one after another and then those of others', so that it meets the same weights
   in its cache when they come again, and one whose core is taken away delays the job by the part
   that it has in hand and no more. OpenBLAS's jobs are run here too (`pool_run_blas`): its parts
   wait for each other, so each needs a thread, and such a job waits for its turn. Others find the
   pool taken and compute alone.

   A range's ticket holds the job's number in its upper half and the parts left in its lower one:
   who claims a part of a job that has ended meanwhile fails to. After a fork the child has none of
   the threads; it makes its own when it first needs them. */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define THREADS_MAX 1024
#define RANGES_MAX 64
#define IDLE_LOOKS 200  /* that an idle thread takes for work before it sleeps */
#define END_LOOKS 2000  /* that the caller takes for the last part's end: it is short, unless its
                           thread's core was taken away */

typedef void part_fn(void *job, int part);

static struct {
    pthread_mutex_t turn;
    struct {
        _Alignas(64) _Atomic uint64_t ticket;
    } ranges[RANGES_MAX];
    _Alignas(64) _Atomic uint32_t number; /* of the last job; what idle threads sleep on */
    _Alignas(64) _Atomic uint32_t left;   /* parts not yet done; what the caller sleeps on */
    _Atomic uint32_t sleeping;
    part_fn *run;
    void *job;
    int parts;
    _Atomic int cut; /* into so many ranges; read before a claim, so it may be the last job's */
    _Atomic int threads; /* that the user allows, the caller's included; read without the turn */
    int started; /* of them in this process, the caller's not included */
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER, .threads = 1};

static void look_again(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

static void sleep_on(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static int range_end(int range, int parts, int cut)
{
    return (int)((long)(range + 1) * parts / cut);
}

/* Claim and run a range's parts until none is left. */
static void run_range(int range)
{
    _Atomic uint64_t *ticket = &pool.ranges[range].ticket;
    uint64_t seen = atomic_load(ticket);
    while ((uint32_t)seen != 0) {
        if (!atomic_compare_exchange_weak(ticket, &seen, seen - 1))
            continue;
        int left = (int)(uint32_t)seen;
        pool.run(pool.job, range_end(range, pool.parts, pool.cut) - left);
        if (atomic_fetch_sub(&pool.left, 1) == 1)
            wake(&pool.left, 1);
        seen = atomic_load(ticket);
    }
}

/* Claim and run parts until none is left, from the range of thread `own` on. */
static void run_parts(int own)
{
    int cut = atomic_load(&pool.cut);
    for (int i = 0; i < cut; i++)
        run_range((own + i) % cut);
}

static void *serve(void *own)
{
    uint32_t seen = atomic_load(&pool.number);
    for (;;) {
        run_parts((int)(intptr_t)own);
        for (int look = 0; look < IDLE_LOOKS && atomic_load(&pool.number) == seen; look++)
            look_again();
        atomic_fetch_add(&pool.sleeping, 1);
        while (atomic_load(&pool.number) == seen)
            sleep_on(&pool.number, seen);
        atomic_fetch_sub(&pool.sleeping, 1);
        seen = atomic_load(&pool.number);
    }
    return NULL;
}

/* Have as many threads as are allowed, or as many as there can be; holds the turn. */
static void start_threads(void)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    if (pool.started >= pool.threads - 1)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the interpreter's */
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.started < pool.threads - 1 &&
           !pthread_create(&thread, &attributes, serve, (void *)(intptr_t)(pool.started + 1)))
        pool.started++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Run all parts of a job and return when they are done; holds the turn. */
static void run_shared(part_fn *run, void *job, int parts)
{
    uint32_t left;
    pool.run = run, pool.job = job, pool.parts = parts;
    atomic_store(&pool.left, (uint32_t)parts);
    uint32_t number = atomic_load(&pool.number) + 1;
    int cut = pool.threads < RANGES_MAX ? pool.threads : RANGES_MAX;
    atomic_store(&pool.cut, cut);
    for (int i = 0, begin = 0; i < cut; i++) {
        int end = range_end(i, parts, cut);
        atomic_store(&pool.ranges[i].ticket, (uint64_t)number << 32 | (uint32_t)(end - begin));
        begin = end;
    }
    atomic_store(&pool.number, number);
    if (atomic_load(&pool.sleeping) != 0)
        wake(&pool.number, parts - 1);
    run_parts(0);
    for (int look = 0; look < END_LOOKS && atomic_load(&pool.left) != 0; look++)
        look_again();
    while ((left = atomic_load(&pool.left)) != 0)
        sleep_on(&pool.left, left);
}

/* Run all parts of a job: alone, or with the pool's threads where nobody else has them. */
static void pool_run(part_fn *run, void *job, int parts, int shared)
{
    if (shared && parts > 1 && pool.threads > 1 && pthread_mutex_trylock(&pool.turn) == 0) {
        start_threads();
        run_shared(run, job, parts);
        pthread_mutex_unlock(&pool.turn);
        return;
    }
    for (int part = 0; part < parts; part++)
        run(job, part);
}

/* What OpenBLAS gives to whoever runs its jobs, as its cblas.h declares it. */
typedef void blas_part_fn(int part, void *data, int extra);
typedef void blas_runner(int, blas_part_fn *, int, size_t, void *, int);
struct blas_job {
    blas_part_fn *run;
    char *data;
    size_t stride;
    int extra;
};

static void run_blas_part(void *job, int part)
{
    struct blas_job *blas = job;
    blas->run(part, blas->data + (size_t)part * blas->stride, blas->extra);
}

static void pool_run_blas(int sync, blas_part_fn *run, int parts, size_t stride, void *data, int extra)
{
    struct blas_job job = {run, data, stride, extra};
    (void)sync; /* returning late is allowed */
    pthread_mutex_lock(&pool.turn);
    if (pool.threads < parts)
        pool.threads = parts;
    start_threads();
    if (pool.started + 1 < parts) {
        fputs("mlxd: no thread can be made for a product\n", stderr);
        abort(); /* as OpenBLAS does: its parts would wait for each other for ever */
    }
    run_shared(run_blas_part, &job, parts);
    pthread_mutex_unlock(&pool.turn);
}

static void before_fork(void)
{
    pthread_mutex_lock(&pool.turn);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&pool.turn);
}

static void after_fork_in_child(void)
{
    pool.started = 0;
    atomic_store(&pool.sleeping, 0);
    pthread_mutex_init(&pool.turn, NULL);
}
