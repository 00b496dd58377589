/* libepoch.so, linked to the driver that remembers (recorder.h): calls its functions in every way
 * that programs have and says what arrived and what was counted. `epoch_main MODE`; modes that
 * count run under libqshim_open.so, "results" and "cost" under any library or none. */
#define _GNU_SOURCE
#include "tests/intercept/epoch_calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/intercept/epoch_open.h"
#include "tests/intercept/recorder.h"

#define CUDA 13000

#define DECLARE(name) extern driver_function name;
QS_SUBMISSIONS(DECLARE)
RECORDER_OTHERS(DECLARE)
#undef DECLARE
extern ask_v1 cuGetProcAddress;
extern ask_v2 cuGetProcAddress_v2;

/* Names, and the functions as the dynamic linker bound them here. */
static const struct linked {
	const char *name;
	driver_function *function;
} submissions[] =
        {
#define LINKED(name) {#name, name},
                QS_SUBMISSIONS(LINKED)},
  others[] = {RECORDER_OTHERS(LINKED)
#undef LINKED
};

#define SUBMISSIONS (sizeof submissions / sizeof *submissions)
#define OTHERS      (sizeof others / sizeof *others)

static __typeof__(qs_test_epoch) *epoch;
static __typeof__(qs_test_doubt) *doubt;
static __typeof__(qs_test_trusted) *trusted;
static __typeof__(qs_test_begin) *begin;
static __typeof__(qs_test_end) *end;

static void *find(void *handle, const char *name)
{
	void *found = dlsym(handle, name);
	if (found)
		return found;
	fprintf(stderr, "epoch: %s\n", dlerror());
	exit(3);
}

static void *driver(void)
{
	void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	if (handle)
		return handle;
	fprintf(stderr, "epoch: %s\n", dlerror());
	exit(3);
}

static void find_open(void)
{
	epoch = (__typeof__(epoch))find(RTLD_DEFAULT, "qs_test_epoch");
	doubt = (__typeof__(doubt))find(RTLD_DEFAULT, "qs_test_doubt");
	trusted = (__typeof__(trusted))find(RTLD_DEFAULT, "qs_test_trusted");
	begin = (__typeof__(begin))find(RTLD_DEFAULT, "qs_test_begin");
	end = (__typeof__(end))find(RTLD_DEFAULT, "qs_test_end");
}

static int call(driver_function *function)
{
	return function(0x1111111111111101, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
	                0x1111111111111114);
}

/* True if the call reached `real` once with all that it was given, and its answer came back. */
static bool arrives(driver_function *function, driver_function *real)
{
	struct record expected, got;
	call(real);
	expected = *recorder_last();
	int status = call(function);
	got = *recorder_last();
	return status == expected.status && got.calls == expected.calls + 1 &&
	       !strcmp(got.name, expected.name) &&
	       !memcmp(got.argument, expected.argument, sizeof got.argument);
}

static uint64_t counted(driver_function *function)
{
	uint64_t before = epoch();
	call(function);
	return epoch() - before;
}

/* What a route hands out for a name must reach the real function and be counted so often. */
static bool right(const char *how, const char *name, driver_function *function,
                  driver_function *real, uint64_t count)
{
	if (function && real && arrives(function, real) && counted(function) == count)
		return true;
	printf("%s %s: %s\n", how, name,
	       !function || !real         ? "not found"
	       : !arrives(function, real) ? "does not arrive"
	                                  : "wrong count");
	return false;
}

static int say(const char *how, size_t names, size_t wrong)
{
	printf("%s: %zu names, %zu wrong\n", how, names, wrong);
	return wrong ? 1 : 0;
}

/* ---- routes ---- */

static int by_link(void)
{
	size_t wrong = 0;
	for (size_t i = 0; i < SUBMISSIONS; i++)
		wrong += !right("link", submissions[i].name, submissions[i].function,
		                recorder_address(submissions[i].name), 1);
	return say("link", SUBMISSIONS, wrong);
}

static int by_dlsym(void)
{
	size_t wrong = 0;
	for (size_t i = 0; i < SUBMISSIONS; i++)
		wrong += !right("dlsym", submissions[i].name,
		                (driver_function *)find(driver(), submissions[i].name),
		                recorder_address(submissions[i].name), 1);
	return say("dlsym", SUBMISSIONS, wrong);
}

/* A name without its version and flavour, as cuGetProcAddress wants it. */
static const char *base_of(const char *name)
{
	static const char *const suffixes[] = {"_ptsz", "_ptds", "_v2"};
	static char base[96];
	snprintf(base, sizeof base, "%s", name);
	for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
		size_t length = strlen(base), cut = strlen(suffixes[i]);
		if (length > cut && !strcmp(base + length - cut, suffixes[i]))
			base[length - cut] = '\0';
	}
	return base;
}

static size_t ask_all(const char *how, ask_v2 *v2, ask_v1 *v1, uint64_t flags)
{
	size_t wrong = 0;
	for (size_t i = 0; i < SUBMISSIONS; i++) {
		const char *name = base_of(submissions[i].name);
		driver_function *function = NULL;
		int answer = 9;
		int status = v2 ? v2(name, &function, CUDA, flags, &answer)
		                : v1(name, &function, CUDA, flags);
		wrong += status || (v2 && answer) ||
		         !right(how, name, function, recorder_answer(name, CUDA, flags), 1);
	}
	return wrong;
}

static int by_ask(void)
{
	ask_v2 *v2 = (ask_v2 *)find(driver(), "cuGetProcAddress_v2"), *again = NULL;
	ask_v1 *v1 = (ask_v1 *)find(driver(), "cuGetProcAddress"), *old = NULL;
	size_t wrong = v2("cuGetProcAddress", (driver_function **)&again, CUDA, 0, NULL) != 0;
	wrong += v1("cuGetProcAddress", (driver_function **)&old, 11030, 0) != 0;
	wrong += ask_all("ask", v2, NULL, 0) + ask_all("ask", v2, NULL, PER_THREAD);
	wrong += ask_all("ask v1", NULL, v1, 0) + ask_all("ask v1", NULL, v1, PER_THREAD);
	wrong += ask_all("ask again", again, NULL, 0) + ask_all("ask old", NULL, old, 0);
	wrong += ask_all("ask linked", cuGetProcAddress_v2, NULL, PER_THREAD);
	wrong += ask_all("ask linked v1", NULL, cuGetProcAddress, 0);
	return say("ask", 8 * SUBMISSIONS, wrong);
}

/* Other functions are handed out as they are; what fails, fails as before. */
static int untouched(void)
{
	ask_v2 *ask = (ask_v2 *)find(driver(), "cuGetProcAddress_v2");
	size_t wrong = 0;
	driver_function *function = NULL;
	int answer = 9;
	for (size_t i = 0; i < OTHERS; i++) {
		driver_function *real = recorder_address(others[i].name);
		const char *base = base_of(others[i].name);
		wrong += find(driver(), others[i].name) != (void *)real;
		wrong += others[i].function != real;
		wrong += ask(base, &function, CUDA, 0, &answer) || function != real;
	}
	function = (driver_function *)(void *)find;
	wrong += ask("cuLaunchNothing", &function, CUDA, 0, &answer) != NOT_FOUND || function ||
	         answer != 1;
	wrong += ask("cuLaunchKernel", &function, CUDA, 0, NULL) != 0;
	return say("untouched", OTHERS, wrong);
}

/* ---- what is counted, and when ---- */

/* Inside a hooked call of cuBLAS nothing of the program's is submitted. */
static int nested(void)
{
	size_t wrong = 0;
	for (size_t i = 0; i < SUBMISSIONS; i++) {
		wrong += !begin();
		wrong += !right("nested", submissions[i].name, submissions[i].function,
		                recorder_address(submissions[i].name), 0);
		end();
	}
	wrong += counted(cuLaunchKernel) != 1;
	return say("nested", SUBMISSIONS, wrong);
}

static uint64_t seen_during;

static void look(void)
{
	seen_during = epoch();
}

static int once_made(void)
{
	uint64_t before = epoch();
	recorder_set_during(look);
	call(cuMemcpyAsync);
	recorder_set_during(NULL);
	printf("during %llu, after %llu\n", (unsigned long long)(seen_during - before),
	       (unsigned long long)(epoch() - before));
	return 0;
}

#define THREADS 4
#define ROUNDS  50000

/* All at once, from the first call on: the exports find their originals meanwhile. */
static void *submit(void *barrier)
{
	pthread_barrier_wait(barrier);
	for (int i = 0; i < ROUNDS; i++) {
		call(cuLaunchKernel);
		call(cuMemsetD8Async);
	}
	return (void *)(recorder_last()->calls == 2 * ROUNDS ? "" : NULL);
}

static int threads(void)
{
	pthread_t thread[THREADS];
	pthread_barrier_t barrier;
	uint64_t before = epoch();
	bool good = true;
	pthread_barrier_init(&barrier, NULL, THREADS);
	for (int i = 0; i < THREADS; i++)
		pthread_create(&thread[i], NULL, submit, &barrier);
	for (int i = 0; i < THREADS; i++) {
		void *arrived = NULL;
		pthread_join(thread[i], &arrived);
		good = good && arrived;
	}
	printf("%llu of %d, arrived %d\n", (unsigned long long)(epoch() - before),
	       2 * THREADS * ROUNDS, good);
	return 0;
}

/* ---- limits ---- */

/* More functions than there are thunks: the rest is the driver's own, and reuse is off. */
static int exhausted(void)
{
	ask_v2 *ask = (ask_v2 *)find(driver(), "cuGetProcAddress_v2");
	int thunks = 0, own = 0, wrong = 0;
	for (int i = 0; i < QS_LOOKUP_SLOTS + 10; i++) {
		char name[32];
		driver_function *function = NULL, *again = NULL;
		snprintf(name, sizeof name, "cuLaunchNumber%d", i);
		wrong += ask(name, &function, CUDA, 0, NULL) || ask(name, &again, CUDA, 0, NULL);
		wrong += function != again || call(function) != i;
		if (function == recorder_answer(name, CUDA, 0))
			own++;
		else
			thunks++;
	}
	printf("thunks %d, own %d, wrong %d, trusted %d, %s\n", thunks, own, wrong, trusted(),
	       doubt());
	return 0;
}

/* RTLD_NEXT from a library after the shim leads past it. */
static int past(void)
{
	driver_function *next = (driver_function *)dlsym(RTLD_NEXT, "cuLaunchKernel");
	printf("found %d, counted %d, %s\n", next != NULL, next ? (int)counted(next) : -1, doubt());
	return 0;
}

/* With another preloaded library that wraps cuLaunchKernel. */
static int wrapped(void)
{
	long (*passed)(void) = (long (*)(void))find(RTLD_DEFAULT, "wrap_launch_count");
	bool good = arrives(cuLaunchKernel, recorder_address("cuLaunchKernel"));
	long before = passed();
	int count = (int)counted(cuLaunchKernel);
	printf("arrives %d, counted %d, wrapped %ld\n", good, count, passed() - before);
	printf("%s\n", doubt());
	return 0;
}

/* ---- with any library, or none ---- */

static void tell(const char *name, driver_function *function)
{
	int status = call(function);
	const struct record *last = recorder_last();
	word sum = 0;
	for (int i = 0; i < ARGUMENTS; i++)
		sum = sum * 31 + last->argument[i];
	printf("%s %s %d %lx\n", name, last->name, status, (unsigned long)sum);
}

/* The same lines whatever is preloaded. */
static int results(void)
{
	ask_v2 *ask = (ask_v2 *)find(driver(), "cuGetProcAddress_v2");
	for (size_t i = 0; i < SUBMISSIONS; i++) {
		driver_function *function = NULL;
		const char *base = base_of(submissions[i].name);
		tell(submissions[i].name, submissions[i].function);
		tell(submissions[i].name, (driver_function *)find(driver(), submissions[i].name));
		ask(base, &function, CUDA, PER_THREAD, NULL);
		tell(base, function);
	}
	for (size_t i = 0; i < OTHERS; i++)
		tell(others[i].name, others[i].function);
	return 0;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* Nanoseconds of a call: the least of many batches. */
static double cost_of(driver_function *function)
{
	double least = 1e30;
	for (int i = 0; i < 300; i++) {
		double start = now();
		for (int j = 0; j < 1000; j++)
			call(function);
		double each = (now() - start) / 1000;
		least = each < least ? each : least;
	}
	return least;
}

static int cost(void)
{
	double direct = cost_of(recorder_address("cuLaunchKernel"));
	printf("direct %.2f\n", direct);
	printf("linked %.2f\n", cost_of(cuLaunchKernel) - direct);
	printf("looked up %.2f\n",
	       cost_of((driver_function *)find(driver(), "cuLaunchKernel")) - direct);
	return 0;
}

int epoch_main(const char *mode)
{
	static const struct {
		const char *name;
		int (*run)(void);
		bool open; /* needs the test library */
	} modes[] = {
	        {"link", by_link, true},     {"dlsym", by_dlsym, true},
	        {"ask", by_ask, true},       {"untouched", untouched, false},
	        {"nested", nested, true},    {"once-made", once_made, true},
	        {"threads", threads, true},  {"exhausted", exhausted, true},
	        {"past", past, true},        {"wrapped", wrapped, true},
	        {"results", results, false}, {"cost", cost, false},
	};
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		if (strcmp(modes[i].name, mode))
			continue;
		if (modes[i].open)
			find_open();
		return modes[i].run();
	}
	fprintf(stderr, "epoch: no such mode\n");
	return EXIT_FAILURE;
}
