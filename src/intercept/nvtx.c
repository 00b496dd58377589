/* The library as an NVTX injection: what NVTX_INJECTION64_PATH names is asked to fill the tables of
 * functions behind the program's ranges, once in each object that contains NVTX.
 *
 * Push and pop ranges become layer names (plan/label.h); start and end ranges belong to no thread
 * and are left out. The injection that was set before, in QSHIM_NVTX_NEXT, fills the tables first,
 * and what it put there is called as without us. The structures are those of nvtx3/nvToolsExt.h and
 * nvtx3/nvtxDetail/nvtxTypes.h, declared here because a toolkit may come without them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include "intercept/intercept.h"
#include "note/note.h"
#include "plan/label.h"

#define CALLBACKS_TABLE 1 /* NVTX_ETID_CALLBACKS */

typedef void (*function)(void);

/* NvtxExportTableCallbacks. */
struct callbacks {
	size_t size; /* of the structure, bytes */
	/* Addresses of the function pointers of a module, and how many; 1 = success. */
	int (*table)(int module, function ***pointers, unsigned *count);
};

typedef const void *get_table(uint32_t id);

/* nvtxEventAttributes_t. */
struct attributes {
	uint16_t version, size;
	uint32_t category;
	int32_t color_type;
	uint32_t color;
	int32_t payload_type, reserved;
	uint64_t payload;
	int32_t message_type; /* enum message_type */
	union {
		const char *ascii;
		const wchar_t *unicode;
		const void *registered;
	} message;
};

enum message_type { /* nvtxMessageType_t */
	MESSAGE_ASCII = 1,
	MESSAGE_UNICODE = 2,
	MESSAGE_REGISTERED = 3
};

enum {             /* NvtxCallbackModule */
	CORE = 1,  /* functions without a domain */
	CORE2 = 5, /* functions with one         */
};

/* The functions that are replaced. */
enum hooked {
	PUSH_EX,
	PUSH_A,
	PUSH_W,
	POP,
	DOMAIN_PUSH_EX,
	DOMAIN_POP,
	REGISTER_A,
	REGISTER_W,
	CREATE_A,
	CREATE_W,
	HOOKED
};

/* What the injection behind us put there, by enum hooked; NULL = nothing. */
static function _Atomic next[HOOKED];

static function next_of(enum hooked which)
{
	return atomic_load_explicit(&next[which], memory_order_relaxed);
}

/* ---- texts -------------------------------------------------------------------------------------
 */

/* UTF-8, as much as fits; what is no character is left out. */
static void from_wide(char text[QS_LABEL_LENGTH], const wchar_t *wide)
{
	size_t used = 0;
	for (; wide && *wide; wide++) {
		uint32_t c = (uint32_t)*wide;
		int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
		if (c > 0x10ffff)
			continue;
		if (used + (size_t)more + 1 > QS_LABEL_LENGTH - 1)
			break;
		static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};
		text[used++] = (char)(first[more] | c >> (6 * more));
		for (; more > 0; more--)
			text[used++] = (char)(0x80 | (c >> (6 * (more - 1)) & 0x3f));
	}
	text[used] = '\0';
}

/* Registered strings: open addressing by handle, never shrunk; further ones name nothing. */
#define STRINGS 4096 /* power of two */

static struct {
	_Atomic uintptr_t handle; /* 0 = empty                               */
	char *_Atomic text;       /* NULL until it is complete               */
} strings[STRINGS];

static size_t slot_of(uintptr_t handle, size_t i)
{
	return ((size_t)((uint64_t)handle * UINT64_C(0x9e3779b97f4a7c15) >> 32) + i) &
	       (STRINGS - 1);
}

static void remember(const void *handle, char *text)
{
	for (size_t i = 0; i < STRINGS; i++) {
		uintptr_t empty = 0;
		size_t slot = slot_of((uintptr_t)handle, i);
		if (atomic_compare_exchange_strong(&strings[slot].handle, &empty,
		                                   (uintptr_t)handle) ||
		    empty == (uintptr_t)handle) {
			/* A text that is replaced may still be read: it stays. */
			atomic_store(&strings[slot].text, text);
			return;
		}
	}
	free(text);
}

static const char *recall(const void *handle)
{
	for (size_t i = 0; handle && i < STRINGS; i++) {
		size_t slot = slot_of((uintptr_t)handle, i);
		uintptr_t found = atomic_load(&strings[slot].handle);
		if (!found)
			return NULL;
		if (found == (uintptr_t)handle)
			return atomic_load(&strings[slot].text);
	}
	return NULL;
}

/* Without an injection behind us that makes handles, the text is its own. */
static const void *registered(const void *handle, const char *text)
{
	char *copy = strndup(text ? text : "", QS_LABEL_LENGTH - 1);
	if (!copy)
		return handle;
	if (!handle)
		handle = copy;
	remember(handle, copy);
	return handle;
}

/* ---- ranges ------------------------------------------------------------------------------------
 */

/* What follows the first comma is different each time: sequence numbers and sizes (PyTorch's
 * emit_nvtx), parameters (layerwise markers of inference servers). */
static int enter(const void *domain, const char *name)
{
	char part[QS_LABEL_LENGTH];
	size_t length = name ? strcspn(name, ",") : 0;
	if (length > sizeof part - 1)
		length = sizeof part - 1;
	if (length)
		memcpy(part, name, length);
	part[length] = '\0';
	return qs_label_enter(domain, part);
}

static int enter_wide(const void *domain, const wchar_t *name)
{
	char text[QS_LABEL_LENGTH];
	from_wide(text, name);
	return enter(domain, text);
}

static int enter_attributes(const void *domain, const struct attributes *event)
{
	if (!event || event->size < sizeof *event)
		return enter(domain, NULL);
	if (event->message_type == MESSAGE_UNICODE)
		return enter_wide(domain, event->message.unicode);
	return enter(domain, event->message_type == MESSAGE_ASCII ? event->message.ascii
	                     : event->message_type == MESSAGE_REGISTERED
	                             ? recall(event->message.registered)
	                             : NULL);
}

static int push_ex(const struct attributes *event)
{
	int depth = enter_attributes(NULL, event);
	function then = next_of(PUSH_EX);
	return then ? ((__typeof__(push_ex) *)then)(event) : depth;
}

static int push_a(const char *name)
{
	int depth = enter(NULL, name);
	function then = next_of(PUSH_A);
	return then ? ((__typeof__(push_a) *)then)(name) : depth;
}

static int push_w(const wchar_t *name)
{
	int depth = enter_wide(NULL, name);
	function then = next_of(PUSH_W);
	return then ? ((__typeof__(push_w) *)then)(name) : depth;
}

static int pop(void)
{
	int depth = qs_label_leave(NULL);
	function then = next_of(POP);
	return then ? ((__typeof__(pop) *)then)() : depth;
}

static int domain_push_ex(const void *domain, const struct attributes *event)
{
	int depth = enter_attributes(domain, event);
	function then = next_of(DOMAIN_PUSH_EX);
	return then ? ((__typeof__(domain_push_ex) *)then)(domain, event) : depth;
}

static int domain_pop(const void *domain)
{
	int depth = qs_label_leave(domain);
	function then = next_of(DOMAIN_POP);
	return then ? ((__typeof__(domain_pop) *)then)(domain) : depth;
}

static const void *register_a(const void *domain, const char *text)
{
	function then = next_of(REGISTER_A);
	return registered(then ? ((__typeof__(register_a) *)then)(domain, text) : NULL, text);
}

static const void *register_w(const void *domain, const wchar_t *wide)
{
	char text[QS_LABEL_LENGTH];
	function then = next_of(REGISTER_W);
	from_wide(text, wide);
	return registered(then ? ((__typeof__(register_w) *)then)(domain, wide) : NULL, text);
}

/* Any value that no other domain has; never dereferenced. */
static const void *new_domain(void)
{
	static _Atomic uintptr_t last;
	return (const void *)(atomic_fetch_add(&last, 1) + 1);
}

static const void *create_a(const char *name)
{
	function then = next_of(CREATE_A);
	return then ? ((__typeof__(create_a) *)then)(name) : new_domain();
}

static const void *create_w(const wchar_t *name)
{
	function then = next_of(CREATE_W);
	return then ? ((__typeof__(create_w) *)then)(name) : new_domain();
}

/* ---- injection ---------------------------------------------------------------------------------
 */

/* Where the functions are: NVTX_CBID_CORE_* and NVTX_CBID_CORE2_*. */
static const struct {
	int module;
	unsigned index;
	function own;
} hooks[HOOKED] = {
        [PUSH_EX] = {CORE, 8, (function)push_ex},
        [PUSH_A] = {CORE, 9, (function)push_a},
        [PUSH_W] = {CORE, 10, (function)push_w},
        [POP] = {CORE, 11, (function)pop},
        [DOMAIN_PUSH_EX] = {CORE2, 4, (function)domain_push_ex},
        [DOMAIN_POP] = {CORE2, 5, (function)domain_pop},
        [REGISTER_A] = {CORE2, 10, (function)register_a},
        [REGISTER_W] = {CORE2, 11, (function)register_w},
        [CREATE_A] = {CORE2, 12, (function)create_a},
        [CREATE_W] = {CORE2, 13, (function)create_w},
};

typedef int initialise(get_table *get);

__attribute__((visibility("default"))) initialise InitializeInjectionNvtx2;

static initialise *behind; /* the injection set before, NULL = none */

static void load_behind(void)
{
	const char *path = secure_getenv("QSHIM_NVTX_NEXT");
	if (!path || !*path)
		return;
	void *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
	initialise *found =
	        handle ? (initialise *)qs_real_dlsym(handle, "InitializeInjectionNvtx2") : NULL;
	if (!found)
		qs_message(QS_LOG_WARN, "%s: no NVTX injection; its tool sees no ranges", path);
	if (found != InitializeInjectionNvtx2)
		behind = found;
}

/* The pointer in the program's table, NULL if it has none. */
static function *pointer_of(get_table *get, enum hooked which)
{
	const struct callbacks *callbacks = get(CALLBACKS_TABLE);
	function **pointers = NULL;
	unsigned count = 0;
	if (!callbacks || callbacks->size < sizeof *callbacks ||
	    !callbacks->table(hooks[which].module, &pointers, &count) ||
	    hooks[which].index >= count)
		return NULL;
	return pointers[hooks[which].index];
}

/* Before, the pointers lead to code that initialises and calls again: only what the injection
 * behind us changed may be called. */
int InitializeInjectionNvtx2(get_table *get)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	function before[HOOKED];
	for (int i = 0; i < HOOKED; i++) {
		function *pointer = pointer_of(get, i);
		before[i] = pointer ? *pointer : NULL;
	}
	pthread_once(&once, load_behind);
	if (behind)
		behind(get);
	for (int i = 0; i < HOOKED; i++) {
		function *pointer = pointer_of(get, i);
		if (!pointer)
			continue;
		if (*pointer != before[i])
			atomic_store(&next[i], *pointer);
		*pointer = hooks[i].own;
	}
	return 1;
}
