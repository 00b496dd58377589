/* The table of watches.
 *
 * Reports look into an array sorted by the end of the watched ranges, and take no lock: there are
 * two arrays, of which a change fills the one not in use and then publishes it by its number. A
 * report that finds another number when it is done starts again; what it marked meanwhile is
 * suspect without need. Watches are never freed, so a mark that comes late hits, at worst, the next
 * watch in the same place.
 *
 * A range is hit by every kernel argument from the start of its memory (allocation, or reservation
 * of addresses) to its end: a kernel that gets a tensor writes beyond the pointer, and a weight may
 * be a part of a tensor that starts before it.
 */
#include "operand/track.h"

#include <pthread.h>

#include <cuda.h>

#include "intercept/driver.h"
#include "operand/mapping.h"

#define USES_MAX     31 /* kernel uses remembered for each watch, as bits                */
#define OTHER        (1u << USES_MAX)
#define READER_AFTER 8   /* verifications in a row that found a use to change nothing     */
#define WRITER       255 /* streak of a use that was a reader and wrote: never one again  */
#define REACH_MAX    32  /* watches that one address makes suspect one by one             */
#define TRIES_MAX    100 /* of a report whose table is taken away                         */
#define SHARED_MAX   64  /* allocations that others can write                             */
#define OWN_MAX      256 /* kernels of ours, in all contexts                              */

struct qs_watch {
	_Atomic uintptr_t first, end;   /* bytes watched                                          */
	_Atomic uintptr_t region;       /* where their memory starts                              */
	_Atomic bool gone;              /* freed or unmapped                                      */
	_Atomic uint64_t suspects;      /* made suspect alone, see count_of()                     */
	_Atomic uint64_t cleared;       /* count_of() that a verification covers                  */
	_Atomic uint64_t everything;    /* of the process, when a verification was arranged last  */
	_Atomic uint32_t ran;           /* bits of uses since then, and OTHER                     */
	_Atomic uint32_t verified;      /* the same, of the verification whose outcome is due     */
	_Atomic uint32_t recent;        /* bits of uses since there was no room for one           */
	_Atomic uint64_t use[USES_MAX]; /* names, 0 = free                                        */
	_Atomic unsigned char streak[USES_MAX]; /* verifications in a row without a change        */
	bool taken;                             /* under the lock                                 */
};

/* One watched range, and the least of this and all later ones: a walk ends there. */
struct entry {
	_Atomic(struct qs_watch *) watch;
	_Atomic uintptr_t first, end, region;
	_Atomic uintptr_t least_first, least_region;
};

struct table {
	_Atomic size_t count;
	struct entry entry[QS_WATCHES_MAX];
};

static struct qs_watch watches[QS_WATCHES_MAX];
static struct table tables[2];
static _Atomic uint64_t version; /* tables[version & 1] is in use */
static _Atomic uint64_t everything;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Kernels of ours, 0 = free, and the place of the address that each writes for the program. */
static struct own {
	_Atomic uintptr_t function;
	_Atomic int written;
} own[OWN_MAX];

static _Atomic uintptr_t shared[SHARED_MAX]; /* starts of allocations, 0 = free */
static _Atomic bool shared_overflow;         /* there were more                 */

_Atomic unsigned char qs_watching;
struct qs_track_bounds qs_track_bounds;

bool qs_watch_any(void)
{
	return atomic_load_explicit(&qs_watching, memory_order_relaxed);
}

uint64_t qs_track_version(void)
{
	return atomic_load(&version);
}

/* ---- the table ---- */

static void set(struct entry *entry, struct qs_watch *watch)
{
	atomic_store_explicit(&entry->watch, watch, memory_order_release);
	atomic_store_explicit(&entry->first, atomic_load(&watch->first), memory_order_release);
	atomic_store_explicit(&entry->end, atomic_load(&watch->end), memory_order_release);
	atomic_store_explicit(&entry->region, atomic_load(&watch->region), memory_order_release);
}

static uintptr_t least(uintptr_t a, uintptr_t b)
{
	return a < b ? a : b;
}

static void find_least(struct table *table, size_t count)
{
	uintptr_t first = UINTPTR_MAX, region = UINTPTR_MAX;
	for (size_t i = count; i-- > 0;) {
		struct entry *entry = &table->entry[i];
		first = least(first, atomic_load(&entry->first));
		region = least(region, atomic_load(&entry->region));
		atomic_store_explicit(&entry->least_first, first, memory_order_release);
		atomic_store_explicit(&entry->least_region, region, memory_order_release);
	}
}

static void set_bounds(const struct table *table, size_t count)
{
	uintptr_t low = count ? atomic_load(&table->entry[0].least_region) : 0;
	uintptr_t high = count ? atomic_load(&table->entry[count - 1].end) : 0;
	atomic_store(&qs_track_bounds.low, low);
	atomic_store(&qs_track_bounds.high, high);
}

/* Fills the table not in use from the other, with one watch more or less, and puts it into use.
 * Under the lock. What is near must be so before the table says it, and as long as it does. */
static void change(struct qs_watch *added, const struct qs_watch *removed)
{
	uint64_t now = atomic_load(&version);
	struct table *from = &tables[now & 1], *to = &tables[(now + 1) & 1];
	size_t count = 0;
	for (size_t i = 0; i < atomic_load(&from->count); i++) {
		struct qs_watch *watch = atomic_load(&from->entry[i].watch);
		if (added && atomic_load(&added->end) <= atomic_load(&watch->end)) {
			set(&to->entry[count++], added);
			added = NULL;
		}
		if (watch != removed)
			set(&to->entry[count++], watch);
	}
	if (added)
		set(&to->entry[count++], added);
	find_least(to, count);
	atomic_store_explicit(&to->count, count, memory_order_release);
	if (!removed)
		set_bounds(to, count);
	if (!removed)
		atomic_store(&qs_watching, 1);
	atomic_store(&version, now + 1);
	if (removed)
		set_bounds(to, count);
	if (!count)
		atomic_store(&qs_watching, 0);
}

/* ---- looking up ---- */

/* What a report does to a watch that it hits. */
typedef void mark_function(struct qs_watch *watch, uint64_t use);

/* The bytes that a report is about. */
struct query {
	uintptr_t first, end; /* [first, end)                                                */
	bool reach;           /* hit regions up to the end of the range, not the range alone */
};

static uintptr_t load(const _Atomic uintptr_t *from)
{
	return atomic_load_explicit(from, memory_order_acquire);
}

/* Index of the first range that ends after `address`. */
static size_t above(const struct table *table, size_t count, uintptr_t address)
{
	size_t low = 0, high = count;
	while (low < high) {
		size_t middle = (low + high) / 2;
		if (load(&table->entry[middle].end) > address)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static mark_function mark_used, mark_gone;
static void mark_crowd(struct qs_watch *first, uint64_t use, bool used);

/* True if an address that reaches the entry reaches a great many after it: all memory in one
 * reservation. */
static bool is_crowd(const struct table *table, size_t count, size_t i, const struct query *query)
{
	return query->reach && i + REACH_MAX < count &&
	       load(&table->entry[i + REACH_MAX].region) < query->end;
}

/* True if there was a hit; without a mark, the first is enough. */
static bool walk(const struct table *table, const struct query *query, mark_function *mark,
                 uint64_t use)
{
	size_t count = atomic_load_explicit(&table->count, memory_order_acquire);
	bool hit = false;
	for (size_t i = above(table, count, query->first); i < count; i++) {
		const struct entry *entry = &table->entry[i];
		if (load(query->reach ? &entry->least_region : &entry->least_first) >= query->end)
			break;
		if (load(query->reach ? &entry->region : &entry->first) >= query->end)
			continue;
		struct qs_watch *watch = atomic_load_explicit(&entry->watch, memory_order_acquire);
		if (!mark)
			return true;
		if (!hit && mark != mark_gone && is_crowd(table, count, i, query)) {
			mark_crowd(watch, use, mark == mark_used);
			return true;
		}
		mark(watch, use);
		hit = true;
	}
	return hit;
}

/* A report that does not get a look at the table makes everything suspect. */
static bool visit(struct query query, mark_function *mark, uint64_t use)
{
	for (int i = 0; i < TRIES_MAX; i++) {
		uint64_t before = atomic_load_explicit(&version, memory_order_acquire);
		bool hit = walk(&tables[before & 1], &query, mark, use);
		if (atomic_load_explicit(&version, memory_order_acquire) == before)
			return hit;
	}
	qs_track_everything();
	return true;
}

static struct query bytes_at(uint64_t first, size_t bytes)
{
	uintptr_t end = first + bytes < first ? UINTPTR_MAX : first + bytes;
	return (struct query){first, end, false};
}

static struct query pointer_to(uint64_t first)
{
	return (struct query){first, first == UINTPTR_MAX ? first : first + 1, true};
}

static struct query memory_at(uint64_t first, size_t bytes)
{
	return bytes ? bytes_at(first, bytes) : pointer_to(first);
}

static bool is_near(const struct query *query)
{
	return query->first < load(&qs_track_bounds.high) &&
	       query->end > load(&qs_track_bounds.low);
}

static void report(struct query query, mark_function *mark, uint64_t use)
{
	if (qs_watch_any() && is_near(&query))
		visit(query, mark, use);
}

bool qs_track_reaches(uint64_t word)
{
	return qs_track_near(word) && visit(pointer_to(word), NULL, 0);
}

bool qs_track_overlaps(uint64_t first, size_t bytes)
{
	struct query query = memory_at(first, bytes);
	return qs_watch_any() && is_near(&query) && visit(query, NULL, 0);
}

/* ---- marks ---- */

/* The count first: a verification that takes the bit has then seen the count, see qs_watch_clear.
 */
static void suspect(struct qs_watch *watch, uint32_t ran)
{
	atomic_fetch_add(&watch->suspects, 1);
	atomic_fetch_or(&watch->ran, ran);
}

static void mark_written(struct qs_watch *watch, uint64_t use)
{
	(void)use;
	suspect(watch, OTHER);
}

static void mark_gone(struct qs_watch *watch, uint64_t use)
{
	(void)use;
	atomic_store(&watch->gone, true);
}

/* Gives the place of a use to another. What runs meanwhile may count for the new one, once. False
 * if another thread was there. */
static bool replace(struct qs_watch *watch, int i, uint64_t use)
{
	uint64_t known = atomic_load(&watch->use[i]);
	unsigned char streak = atomic_load(&watch->streak[i]);
	if (streak == WRITER || !atomic_compare_exchange_strong(&watch->streak[i], &streak, 0))
		return false;
	atomic_fetch_and(&watch->verified, ~(1u << i));
	return atomic_compare_exchange_strong(&watch->use[i], &known, use);
}

/* The place of one that did not run for long; -1 if all did, or are writers. A program's phases
 * have kernels of their own, and kernels get words that are addresses by accident: torch.cat passes
 * an array of which most is what the stack held before. */
static int make_place(struct qs_watch *watch, uint64_t use)
{
	const uint32_t recent = atomic_load(&watch->recent);
	for (int i = 0; i < USES_MAX; i++)
		if (!(recent & 1u << i) && replace(watch, i, use))
			return i;
	atomic_store(&watch->recent, 0);
	return -1;
}

/* Index of the use, taken if new; -1 if there is no room. */
static int index_of(struct qs_watch *watch, uint64_t use)
{
	for (int i = 0; i < USES_MAX; i++) {
		uint64_t known = atomic_load_explicit(&watch->use[i], memory_order_relaxed);
		if (!known && atomic_compare_exchange_strong(&watch->use[i], &known, use))
			return i;
		if (known == use)
			return i;
	}
	return make_place(watch, use);
}

static bool is_reader(const struct qs_watch *watch, int i)
{
	return atomic_load(&watch->streak[i]) == READER_AFTER;
}

/* True if it is a reader's. */
static bool note_use(struct qs_watch *watch, uint64_t use)
{
	int i = use ? index_of(watch, use) : -1;
	bool reads = i >= 0 && is_reader(watch, i);
	if (i >= 0 && !(atomic_load_explicit(&watch->recent, memory_order_relaxed) & 1u << i))
		atomic_fetch_or(&watch->recent, 1u << i);
	if (!reads)
		suspect(watch, i < 0 ? OTHER : 1u << i);
	else if (!(atomic_load_explicit(&watch->ran, memory_order_relaxed) & 1u << i))
		atomic_fetch_or(&watch->ran, 1u << i);
	return reads;
}

static void mark_used(struct qs_watch *watch, uint64_t use)
{
	note_use(watch, use);
}

/* One address reaches so many that a launch must not pay for each: all are suspect at once. What a
 * kernel writes from there on begins with the first of them, so a reader of that one is taken for a
 * reader of all. */
static void mark_crowd(struct qs_watch *first, uint64_t use, bool used)
{
	if (!used || !note_use(first, use))
		qs_track_everything();
}

void qs_track_argument(uint64_t word, uint64_t use)
{
	report(pointer_to(word), mark_used, use);
}

void qs_track_write(const void *first, size_t bytes)
{
	if (bytes)
		report(bytes_at((uintptr_t)first, bytes), mark_written, 0);
}

void qs_track_pointer(const void *first)
{
	report(pointer_to((uintptr_t)first), mark_written, 0);
}

void qs_track_gone(const void *first, size_t bytes)
{
	report(memory_at((uintptr_t)first, bytes), mark_gone, 0);
}

void qs_track_all_gone(void)
{
	for (int i = 0; i < OWN_MAX; i++)
		atomic_store(&own[i].function, 0);
	report((struct query){0, UINTPTR_MAX, false}, mark_gone, 0);
}

void qs_track_everything(void)
{
	atomic_fetch_add(&everything, 1);
}

/* ---- watches ---- */

/* Neither part ever falls, so a sum that is as it was means that both are. */
static uint64_t count_of(const struct qs_watch *watch)
{
	return atomic_load(&watch->suspects) + atomic_load(&everything);
}

int qs_watch_state(const struct qs_watch *watch)
{
	if (atomic_load(&watch->gone))
		return QS_WATCH_GONE;
	return count_of(watch) == atomic_load(&watch->cleared) ? QS_WATCH_CLEAN : QS_WATCH_SUSPECT;
}

uint32_t qs_watch_suspects(const struct qs_watch *watch)
{
	return (uint32_t)count_of(watch);
}

/* Which uses ran is taken between two looks at the count, so that the verification answers for no
 * use that came after it. */
void qs_watch_clear(struct qs_watch *watch, uint32_t suspects)
{
	uint64_t all = atomic_load(&everything), count = count_of(watch);
	if ((uint32_t)count != suspects)
		return;
	uint32_t ran = atomic_exchange(&watch->ran, 0);
	if (count_of(watch) != count) {
		atomic_fetch_or(&watch->ran, ran);
		return;
	}
	if (atomic_exchange(&watch->everything, all) != all)
		ran |= OTHER;
	atomic_fetch_or(&watch->verified, ran);
	atomic_store(&watch->cleared, count);
}

static uint32_t readers_of(const struct qs_watch *watch)
{
	uint32_t readers = 0;
	for (int i = 0; i < USES_MAX; i++)
		readers |= is_reader(watch, i) ? 1u << i : 0;
	return readers;
}

static void learn(struct qs_watch *watch, uint32_t ran)
{
	for (int i = 0; i < USES_MAX; i++)
		if (ran & 1u << i && atomic_load(&watch->streak[i]) < READER_AFTER)
			atomic_fetch_add(&watch->streak[i], 1);
}

/* Who wrote is known only if none but readers ran; what was learnt about the others is void. */
static bool unlearn(struct qs_watch *watch, uint32_t ran)
{
	uint32_t readers = readers_of(watch);
	bool by_reader = ran && !(ran & ~readers);
	for (int i = 0; i < USES_MAX; i++) {
		if (by_reader && ran & 1u << i)
			atomic_store(&watch->streak[i], WRITER);
		else if (!(readers & 1u << i) && atomic_load(&watch->streak[i]) != WRITER)
			atomic_store(&watch->streak[i], 0);
	}
	return by_reader;
}

bool qs_watch_readers(struct qs_watch *watch, bool unchanged)
{
	uint32_t ran = atomic_exchange(&watch->verified, 0);
	if (!unchanged)
		return unlearn(watch, ran | atomic_load(&watch->ran));
	learn(watch, ran);
	return false;
}

static struct qs_watch *take(void)
{
	for (size_t i = 0; i < QS_WATCHES_MAX; i++)
		if (!watches[i].taken)
			return &watches[i];
	return NULL;
}

/* Not in the table yet, but a late mark may still hit it: so field by field. */
static void start(struct qs_watch *watch, uintptr_t first, uintptr_t end, uintptr_t region)
{
	watch->taken = true;
	atomic_store(&watch->first, first);
	atomic_store(&watch->end, end);
	atomic_store(&watch->region, region);
	atomic_store(&watch->gone, false);
	atomic_store(&watch->ran, 0);
	atomic_store(&watch->verified, 0);
	atomic_store(&watch->recent, 0);
	for (int i = 0; i < USES_MAX; i++) {
		atomic_store(&watch->use[i], 0);
		atomic_store(&watch->streak[i], 0);
	}
	atomic_store(&watch->everything, atomic_load(&everything));
	atomic_fetch_add(&watch->suspects, 1);
	atomic_store(&watch->cleared, 0);
}

struct qs_watch *qs_watch_add_in(const void *first, const void *end, const void *region)
{
	if ((uintptr_t)first >= (uintptr_t)end || (uintptr_t)region > (uintptr_t)first)
		return NULL;
	pthread_mutex_lock(&lock);
	struct qs_watch *watch = take();
	if (watch) {
		start(watch, (uintptr_t)first, (uintptr_t)end, (uintptr_t)region);
		change(watch, NULL);
	}
	pthread_mutex_unlock(&lock);
	return watch;
}

void qs_watch_remove(struct qs_watch *watch)
{
	if (!watch)
		return;
	pthread_mutex_lock(&lock);
	if (watch->taken)
		change(NULL, watch);
	watch->taken = false;
	pthread_mutex_unlock(&lock);
}

/* The child has one thread; another may have been changing the tables. One by one, as
 * qs_watch_remove() does it, would take the child of a large program 25 ms. */
void qs_track_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	for (size_t i = 0; i < QS_WATCHES_MAX; i++)
		watches[i].taken = false;
	atomic_store(&tables[0].count, 0);
	atomic_store(&tables[1].count, 0);
	atomic_fetch_add(&version, 1);
	set_bounds(tables, 0);
	atomic_store(&qs_watching, 0);
}

/* ---- our own kernels ---- */

void qs_track_own_function(const void *function, int written)
{
	for (int i = 0; i < OWN_MAX; i++) {
		uintptr_t taken = 0;
		if (!atomic_compare_exchange_strong(&own[i].function, &taken,
		                                    (uintptr_t)function) &&
		    taken != (uintptr_t)function)
			continue;
		atomic_store(&own[i].written, written);
		return;
	}
}

bool qs_track_is_own(const void *function, int *written)
{
	for (int i = 0; i < OWN_MAX; i++) {
		uintptr_t taken = atomic_load(&own[i].function);
		if (taken == (uintptr_t)function)
			*written = atomic_load(&own[i].written);
		if (!taken || taken == (uintptr_t)function)
			return taken;
	}
	return false;
}

/* ---- where memory starts ---- */

typedef CUresult attribute_function(void *data, CUpointer_attribute attribute, CUdeviceptr pointer);

/* The start of the allocation or, for mapped memory, of the reserved addresses; 0 if the driver
 * does not know the address, the address itself if there is no driver. */
static uintptr_t start_of(const void *first)
{
	attribute_function *ask = QS_DRIVER(attribute_function, cuPointerGetAttribute);
	CUdeviceptr start = 0;
	if (!ask)
		return (uintptr_t)first;
	if (ask(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (CUdeviceptr)(uintptr_t)first))
		return 0;
	return (uintptr_t)start;
}

static bool is_shared(uintptr_t start)
{
	if (atomic_load(&shared_overflow))
		return true;
	for (int i = 0; i < SHARED_MAX; i++)
		if (atomic_load(&shared[i]) == start)
			return true;
	return false;
}

static bool can_be_shared(uintptr_t start, const void *first, const void *end)
{
	return is_shared(start) ||
	       qs_mapping_is_shared((uintptr_t)first, (uintptr_t)end - (uintptr_t)first);
}

struct qs_watch *qs_watch_add(const void *first, const void *end)
{
	uintptr_t start = start_of(first);
	if (!start || can_be_shared(start, first, end))
		return NULL;
	struct qs_watch *watch = qs_watch_add_in(first, end, (const void *)start);
	/* It may have been shared meanwhile. */
	if (watch && can_be_shared(start, first, end))
		atomic_store(&watch->gone, true);
	return watch;
}

void qs_track_shared(const void *first)
{
	uintptr_t start = start_of(first);
	bool kept = false;
	for (int i = 0; i < SHARED_MAX && start && !kept; i++) {
		uintptr_t taken = 0;
		kept = atomic_compare_exchange_strong(&shared[i], &taken, start) || taken == start;
	}
	if (!kept)
		atomic_store(&shared_overflow, true);
	qs_track_gone(start ? (const void *)start : first, 0);
}

void qs_track_unshared(const void *first)
{
	for (int i = 0; i < SHARED_MAX; i++) {
		uintptr_t start = (uintptr_t)first;
		atomic_compare_exchange_strong(&shared[i], &start, 0);
	}
}
