/* Counters per key in a mapped file that survives SIGKILL, or in anonymous memory.
 *
 * The blocks of the file are allocated before it is mapped: on a disk that is full, a store to a
 * hole would kill the program with SIGBUS. Assumes that nobody truncates the file, and a file
 * system that keeps allocated blocks (one that copies on write may run full later). Left out:
 * growing.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "note/inside.h"
#include "version.h"

#define KEYS_MAX  65536
#define NAMES_MAX 9 /* files of the same rank and pid: containers whose programs all have pid 1 */

_Static_assert(sizeof(struct qs_counter) == 256, "part of the file format");
_Static_assert(sizeof(struct qs_counter_header) == 256, "part of the file format");

/* The table; what bounds it is kept here, not read back from a file that others can write. */
static struct qs_counter_header *_Atomic table;
static uint32_t slots; /* of the table, the last one for "other"; constant once published */
static struct qs_counter alone; /* stands for the table while there is none */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* decisions of slots, and "other" */

static struct qs_counter *slots_of(struct qs_counter_header *header)
{
	return (struct qs_counter *)(header + 1);
}

static bool is_used(const struct qs_counter *counter)
{
	return __atomic_load_n(&counter->used, __ATOMIC_ACQUIRE);
}

/* Opens a file that did not exist; `path` is what it is called. fd or -errno. */
static int open_file(const char *directory, char path[QS_PATH_MAX])
{
	int fd = -EEXIST;
	for (int i = 1; fd == -EEXIST && i <= NAMES_MAX; i++) {
		char pattern[QS_PATH_MAX + 32], more[8] = "";
		if (i > 1)
			snprintf(more, sizeof more, ".%d", i);
		snprintf(pattern, sizeof pattern, "%s/counters.%%r.%%p%s.bin", directory, more);
		if (!qs_path_expand(pattern, path, QS_PATH_MAX))
			return -ENAMETOOLONG;
		fd = qs_open_file(path, O_RDWR | O_EXCL);
	}
	return fd;
}

static void *map(int fd, size_t size)
{
	int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
	return memory == MAP_FAILED ? NULL : memory;
}

/* NULL and a message if there is no such file; an incomplete one is removed again. */
static void *map_file(const char *directory, size_t size)
{
	char path[QS_PATH_MAX] = "", text[QS_ERROR_TEXT];
	void *memory = NULL;
	int fd = open_file(directory, path), error = fd < 0 ? fd : qs_allocate(fd, (off_t)size);
	if (!error && !(memory = map(fd, size)))
		error = -errno;
	if (fd >= 0 && error)
		unlink(path);
	if (fd >= 0)
		close(fd);
	if (error)
		qs_message(QS_LOG_WARN, "%s: %s; counters are kept in memory only", path,
		           qs_error_text(error, text));
	return memory;
}

static void describe(struct qs_counter_header *header, uint32_t count)
{
	header->version = QS_COUNTER_VERSION;
	header->slot_size = sizeof(struct qs_counter);
	header->slots = count;
	header->pid = getpid();
	header->rank = qs_rank();
	header->start = time(NULL);
	snprintf(header->exe, sizeof header->exe, "%s", program_invocation_short_name);
	snprintf(header->program, sizeof header->program, "%s", QS_VERSION);
	memcpy(header->magic, QS_COUNTER_MAGIC, sizeof header->magic);
}

void qs_counter_start(const char *directory, int64_t keys)
{
	uint32_t count = (uint32_t)(keys < 1 ? 1 : keys > KEYS_MAX ? KEYS_MAX : keys) + 1;
	size_t size = sizeof(struct qs_counter_header) + count * sizeof(struct qs_counter);
	struct qs_counter_header *header = directory ? map_file(directory, size) : NULL;
	if (!header)
		header = map(-1, size);
	if (!header)
		return;
	describe(header, count);
	slots = count;
	atomic_store_explicit(&table, header, memory_order_release);
}

/* The mapping stays: the memory is small, and a copy of the parent's pointers may still be around.
 */
void qs_counter_forked(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	atomic_store(&table, NULL);
	memset(&alone, 0, sizeof alone);
}

bool qs_counter_lock(void)
{
	return qs_lock_within_a_second(&lock);
}

void qs_counter_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

static void copy(char *to, size_t size, const char *from)
{
	size_t length = from ? strnlen(from, size - 1) : 0;
	if (length)
		memcpy(to, from, length);
	memset(to + length, 0, size - length);
}

/* The slot of all keys that found none; made when first needed. */
static struct qs_counter *other(struct qs_counter_header *header)
{
	struct qs_counter *counter = header ? &slots_of(header)[slots - 1] : &alone;
	if (is_used(counter))
		return counter;
	pthread_mutex_lock(&lock);
	if (!is_used(counter)) {
		copy(counter->key, sizeof counter->key, "other");
		counter->action = QS_ACTION_NATIVE;
		counter->reason = QS_REASON_CACHE_FULL;
		__atomic_store_n(&counter->used, 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	return counter;
}

/* An index that no other thread has; `slots - 1` if all are taken. */
static uint32_t reserve(struct qs_counter_header *header)
{
	uint32_t index = atomic_load(&header->used);
	while (index < slots - 1 && !atomic_compare_exchange_weak(&header->used, &index, index + 1))
		;
	return index < slots - 1 ? index : slots - 1;
}

struct qs_counter *qs_counter_new(const char *key_text, const struct qs_key *key,
                                  enum qs_action action, enum qs_reason reason, const char *rule,
                                  const char *layer)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	uint32_t index = header ? reserve(header) : 0;
	if (!header || index == slots - 1)
		return other(header);
	struct qs_counter *counter = &slots_of(header)[index];
	copy(counter->key, sizeof counter->key, key_text);
	copy(counter->rule, sizeof counter->rule, rule);
	copy(counter->layer, sizeof counter->layer, layer);
	counter->action = (uint8_t)action;
	counter->reason = (uint8_t)reason;
	counter->role = key->role;
	counter->entry = key->entry;
	counter->weight = key->weight;
	counter->flops = qs_gemm_flops(key);
	__atomic_store_n(&counter->used, 1, __ATOMIC_RELEASE);
	return counter;
}

const char *qs_kept_name(int form)
{
	static const char *const names[QS_KEPT_FORMS] = {"fp8", "fp8 transposed", "nf4",
	                                                 "fp8 tiles"};
	return names[form];
}

void qs_counter_kept(int form, int64_t bytes)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	if (header)
		atomic_fetch_add_explicit(&header->kept_bytes[form], (uint64_t)bytes,
		                          memory_order_relaxed);
}

void qs_counter_kept_use(int form, bool checked)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	if (header)
		atomic_fetch_add_explicit(&header->kept_uses[form], 1, memory_order_relaxed);
	if (header && checked)
		atomic_fetch_add_explicit(&header->kept_checks[form], 1, memory_order_relaxed);
}

void qs_counter_escaped(int form, uint64_t times)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	if (header)
		atomic_fetch_add_explicit(&header->kept_escapes[form], times, memory_order_relaxed);
}

const struct qs_counter_header *qs_counter_header(void)
{
	return atomic_load_explicit(&table, memory_order_acquire);
}

/* "other" stands for many keys: it keeps its own words. */
static bool is_shared(const struct qs_counter *counter)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	return counter == &alone || (header && counter == &slots_of(header)[slots - 1]);
}

int64_t qs_counter_index(const struct qs_counter *counter)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	return header && !is_shared(counter) ? counter - slots_of(header) : -1;
}

void qs_counter_decide(struct qs_counter *counter, enum qs_action action, enum qs_reason reason,
                       const char *rule)
{
	if (is_shared(counter))
		return;
	pthread_mutex_lock(&lock);
	counter->action = (uint8_t)action;
	counter->reason = (uint8_t)reason;
	copy(counter->rule, sizeof counter->rule, rule);
	pthread_mutex_unlock(&lock);
}

const struct qs_counter *qs_counter_at(size_t index)
{
	struct qs_counter_header *header = atomic_load_explicit(&table, memory_order_acquire);
	if (!header)
		return index == 0 && is_used(&alone) ? &alone : NULL;
	struct qs_counter *last = &slots_of(header)[slots - 1];
	uint32_t used = atomic_load(&header->used);
	if (used > slots - 1)
		used = slots - 1;
	if (index < used)
		return &slots_of(header)[index];
	return index == used && is_used(last) ? last : NULL;
}
