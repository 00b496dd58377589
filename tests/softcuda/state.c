/* The state every part of the driver shares: the lock, knobs, counters, ids, and what a fork
 * undoes. Locking goes through the same two functions everywhere, so a call can neither forget to
 * check that the driver is usable nor run a destructor of the program while the lock is held. */
#include "tests/softcuda/inside.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sc_knobs softcuda_knobs = {
        .seed = 1,
        .memory_mib = 8192,
        .capability = 90,
        .driver = 13000,
        .cublaslt_version = 130100,
        .cublaslt12_version = 120900,
        .strict = 1,
};
struct sc_counters softcuda_counters;
_Thread_local struct sc_thread sc_thread;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static bool initialised, forked;
static uint64_t random_state = 1;

struct later {
	CUhostFn function;
	void *data;
	struct later *next;
};
static struct later *pending;

struct name {
	const char *name;
	long *value;
};

#define KNOB(field)                                                                                \
	{                                                                                          \
#field, &softcuda_knobs.field                                                      \
	}
#define COUNTER(field)                                                                             \
	{                                                                                          \
#field, &softcuda_counters.field                                                   \
	}
static const struct name knobs[] = {
        KNOB(seed),
        KNOB(fail_alloc),
        KNOB(memory_mib),
        KNOB(capability),
        KNOB(cublaslt_version),
        KNOB(cublaslt12_version),
        KNOB(fail_fp8),
        KNOB(heuristics_empty),
        KNOB(fail_module),
        KNOB(fail_launch),
        KNOB(null_products),
        KNOB(inner_lt),
        KNOB(strict),
        KNOB(fail_product),
        KNOB(fail_event),
        KNOB(hold_host),
        KNOB(idle_products),
        KNOB(idle_kernels),
        KNOB(fp8_error),
        KNOB(slow_product),
        KNOB(product_us),
        KNOB(fp8_us),
        KNOB(second_us),
        KNOB(wide_second_us),
        KNOB(kernel_us),
        KNOB(ptx),
        KNOB(driver),
        KNOB(reuse),
};
static const struct name counters[] = {
        COUNTER(launches),
        COUNTER(early_launches),
        COUNTER(early_reads),
        COUNTER(early_edges),
        COUNTER(products),
        COUNTER(products_bf16),
        COUNTER(products_fp16),
        COUNTER(products_fp32),
        COUNTER(products_fp8),
        COUNTER(allocations),
        COUNTER(frees),
        COUNTER(live),
        COUNTER(bytes),
        COUNTER(overruns),
        COUNTER(syncs),
        COUNTER(queued),
        COUNTER(ran),
        COUNTER(heuristics),
        COUNTER(captures),
        COUNTER(loose_heuristics),
        COUNTER(descs),
        COUNTER(descs_destroyed),
        COUNTER(graph_launches),
        COUNTER(modules),
        COUNTER(products_first),
        COUNTER(products_second),
        COUNTER(events),
};
#undef KNOB
#undef COUNTER
#define KNOBS    (sizeof knobs / sizeof *knobs)
#define COUNTERS (sizeof counters / sizeof *counters)

static long *find(const struct name *table, size_t count, const char *name)
{
	for (size_t i = 0; i < count; i++)
		if (!strcmp(table[i].name, name))
			return table[i].value;
	return NULL;
}

static void prepare_fork(void)
{
	pthread_mutex_lock(&lock);
}

static void parent_fork(void)
{
	pthread_mutex_unlock(&lock);
}

/* The child has one thread, which took the lock before it was forked; nobody waits there. */
static void child_fork(void)
{
	forked = initialised;
	pthread_cond_init(&finished, NULL);
	pthread_mutex_unlock(&lock);
}

/* The knobs must be known before the first product, and that path may not look anything up. */
__attribute__((constructor)) static void start(void)
{
	for (size_t i = 0; i < KNOBS; i++) {
		char variable[64] = "SOFTCUDA_";
		size_t length = strlen(variable);
		for (const char *p = knobs[i].name; *p && length + 1 < sizeof variable; p++)
			variable[length++] = (char)toupper((unsigned char)*p);
		const char *text = getenv(variable);
		if (text)
			*knobs[i].value = strtol(text, NULL, 0);
	}
	random_state = (uint64_t)softcuda_knobs.seed;
	sc_allocations_until_failure = softcuda_knobs.fail_alloc;
	pthread_atfork(prepare_fork, parent_fork, child_fork);
}

/* What exists is not forgotten: only what was counted. */
static void zero_counters(void)
{
	struct sc_counters kept = {.live = softcuda_counters.live,
	                           .bytes = softcuda_counters.bytes,
	                           .events = softcuda_counters.events,
	                           .queued = softcuda_counters.queued};
	softcuda_counters = kept;
	for (struct sc_kernel *kernel = sc_kernels; kernel; kernel = kernel->next)
		kernel->launches = 0;
}

void softcuda_set(const char *knob, long value)
{
	long *field = find(knobs, KNOBS, knob);
	pthread_mutex_lock(&lock);
	if (field == &softcuda_knobs.seed)
		random_state = (uint64_t)value;
	if (field == &softcuda_knobs.fail_alloc)
		sc_allocations_until_failure = value;
	if (field)
		*field = value;
	else if (!strcmp(knob, "counters"))
		zero_counters();
	sc_wake(); /* hold_host may be over */
	pthread_mutex_unlock(&lock);
	if (!field && strcmp(knob, "counters")) {
		fprintf(stderr, "softcuda: no knob is named %s\n", knob);
		abort();
	}
}

static long kernel_launches(const char *name)
{
	long launches = 0;
	for (struct sc_kernel *kernel = sc_kernels; kernel; kernel = kernel->next)
		if (!strcmp(kernel->code->name, name))
			launches += kernel->launches;
	return launches;
}

long softcuda_get(const char *counter)
{
	const long *field = find(counters, COUNTERS, counter);
	if (!field)
		field = find(knobs, KNOBS, counter);
	pthread_mutex_lock(&lock);
	long value = field ? *field : -1;
	if (!strncmp(counter, "kernel:", 7))
		value = kernel_launches(counter + 7);
	pthread_mutex_unlock(&lock);
	return value;
}

void softcuda_count(long *counter)
{
	pthread_mutex_lock(&lock);
	++*counter;
	pthread_mutex_unlock(&lock);
}

CUresult sc_initialise(void)
{
	pthread_mutex_lock(&lock);
	if (!forked)
		initialised = true;
	bool usable = !forked;
	pthread_mutex_unlock(&lock);
	return usable ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult sc_enter(void)
{
	pthread_mutex_lock(&lock);
	if (initialised && !forked)
		return CUDA_SUCCESS;
	pthread_mutex_unlock(&lock);
	return CUDA_ERROR_NOT_INITIALIZED;
}

CUresult sc_enter_context(CUcontext *context)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	*context = sc_current();
	if (!*context)
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!(*context)->live)
		return sc_leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
	if ((*context)->broken)
		return sc_leave((*context)->broken);
	return CUDA_SUCCESS;
}

CUresult sc_leave(CUresult result)
{
	struct later *run = pending;
	pending = NULL;
	pthread_mutex_unlock(&lock);
	while (run) {
		struct later *next = run->next;
		run->function(run->data);
		free(run);
		run = next;
	}
	return result;
}

void sc_later(CUhostFn function, void *data)
{
	struct later *later = sc_alloc(sizeof *later);
	*later = (struct later){function, data, pending};
	pending = later;
}

void sc_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

void sc_lock(void)
{
	pthread_mutex_lock(&lock);
}

void sc_wait(void)
{
	pthread_cond_wait(&finished, &lock);
}

void sc_wake(void)
{
	pthread_cond_broadcast(&finished);
}

unsigned long long sc_new_id(void)
{
	static unsigned long long last;
	return ++last;
}

uint64_t sc_token(void)
{
	if (!sc_thread.token)
		sc_thread.token = sc_new_id();
	return sc_thread.token;
}

/* A linear congruential generator (Knuth's MMIX constants), upper bits. */
unsigned sc_random(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (unsigned)(random_state >> 33);
}

void *sc_alloc(size_t bytes)
{
	return sc_grow(NULL, bytes);
}

void *sc_grow(void *old, size_t bytes)
{
	void *memory = realloc(old, bytes ? bytes : 1);
	if (!memory) {
		fputs("softcuda: out of host memory\n", stderr);
		abort();
	}
	return memory;
}
