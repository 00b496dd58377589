/* The file of a policy while the program runs: has it changed, and to what?
 *
 * Assumes that it is called about once a second. A file is read only when it has been left alone
 * for a second: then its writer is done, and a later change shows in its times, however coarse
 * these are. A reading that gives the text of the one before is no change. Left out: presets, and
 * files that the start found off or not for this process, as nothing of the library runs there.
 */
#include <errno.h>
#include <string.h>

#include "note/note.h"
#include "policy/rule.h"

#define SETTLED 1.0 /* s without a change */

struct qs_version qs_version_of(const struct stat *status)
{
	return (struct qs_version){
	        .device = status->st_dev,
	        .inode = status->st_ino,
	        .size = status->st_size,
	        .written = status->st_mtim,
	        .attended = status->st_ctim,
	};
}

static bool is_same_time(struct timespec a, struct timespec b)
{
	return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static bool is_same(const struct qs_version *a, const struct qs_version *b)
{
	return a->device == b->device && a->inode == b->inode && a->size == b->size &&
	       is_same_time(a->written, b->written) && is_same_time(a->attended, b->attended);
}

/* A time to come is that of another machine's clock, which says nothing. */
bool qs_version_is_young(const struct qs_version *version)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	double age = (double)(now.tv_sec - version->attended.tv_sec) +
	             1e-9 * (double)(now.tv_nsec - version->attended.tv_nsec);
	return age >= 0 && age < SETTLED;
}

bool qs_policy_is_watched(const struct qs_policy *policy)
{
	return *policy->source.path;
}

/* Rules, mode and process may change at any time; the rest was used to set things up. */
static bool is_fixed(const struct qs_option *option)
{
	return strcmp(option->section, "qshim") != 0;
}

static void tell_fixed(const struct qs_policy *old, const struct qs_policy *new)
{
	char before[QS_PATH_MAX], after[QS_PATH_MAX];
	const struct qs_option *option;
	for (int i = 0; (option = qs_option_at(i)); i++) {
		qs_option_text(&old->options, option, before, sizeof before);
		qs_option_text(&new->options, option, after, sizeof after);
		if (is_fixed(option) && strcmp(before, after) != 0)
			qs_message(QS_LOG_WARN,
			           "%s: [%s] %s = %s takes effect at the program's next start",
			           new->name, option->section, option->key, after);
	}
}

static void keep(const struct qs_policy *policy)
{
	if (!policy->broken)
		qs_message(QS_LOG_WARN, "%s: the policy read before stays in effect", policy->name);
}

static void miss(struct qs_policy *policy)
{
	if (policy->source.missing)
		return;
	policy->source.missing = true;
	qs_message(QS_LOG_WARN, "%s: %s", policy->name, strerror(errno));
	keep(policy);
}

static struct qs_policy *read_again(struct qs_policy *policy)
{
	struct qs_policy *next = qs_policy_again(policy);
	if (!next) {
		if (!policy->source.same)
			keep(policy);
		return NULL;
	}
	tell_fixed(policy, next);
	next->earlier = policy;
	return next;
}

struct qs_policy *qs_policy_look(struct qs_policy *policy)
{
	struct qs_source *source = &policy->source;
	struct qs_policy *next = NULL;
	struct stat status;
	int saved = errno;
	if (stat(source->path, &status)) {
		miss(policy);
	} else {
		const struct qs_version version = qs_version_of(&status);
		source->missing = false;
		if (!is_same(&version, &source->version) && !qs_version_is_young(&version)) {
			source->version = version;
			next = read_again(policy);
		}
	}
	errno = saved;
	return next;
}
