/* Finds the policy the environment asks for: QSHIM, QSHIM_POLICY, QSHIM_SET and the variables of
 * the options table, in that order of reading; what is read later wins.
 *
 * Whatever goes wrong, the result is a policy that makes the library do nothing, and one message. A
 * file is read only if it is a regular one of at most 1 MiB; symbolic links are the user's own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "note/note.h"
#include "policy/rule.h"

/* What qs_policy_load() returns when even a policy cannot be allocated. */
static struct qs_policy no_memory = {
        .options = {.version = 1, .mode = QS_MODE_OFF},
        .otherwise = {.name = "default"},
        .broken = true,
};

static struct qs_policy *policy_new(void)
{
	struct qs_policy *policy = calloc(1, sizeof *policy);
	if (!policy)
		return NULL;
	qs_options_default(&policy->options);
	strcpy(policy->otherwise.name, "default");
	policy->otherwise.action = QS_ACTION_AUTO;
	return policy;
}

static void policy_clear(struct qs_policy *policy)
{
	for (int i = 0; i < policy->count; i++)
		qs_rule_clear(&policy->rules[i]);
	free(policy->rules);
	policy->rules = NULL;
	policy->count = 0;
	qs_rule_clear(&policy->otherwise);
	qs_patterns_free(&policy->process);
}

void qs_policy_free(struct qs_policy *policy)
{
	if (!policy || policy == &no_memory)
		return;
	policy_clear(policy);
	free(policy->source.set);
	free(policy);
}

/* Keeps nothing of a policy that could not be read: half a policy is a guess. */
static void policy_break(struct qs_policy *policy)
{
	policy_clear(policy);
	qs_options_default(&policy->options);
	policy->otherwise.action = QS_ACTION_NATIVE;
	policy->broken = true;
}

/* The process list was checked when it was set, so only memory can be missing here. */
static bool policy_finish(struct qs_policy *policy)
{
	char why[QS_WHY];
	const char *list = policy->options.process;
	if (!*list || qs_patterns_add(&policy->process, list, why))
		return true;
	qs_message(QS_LOG_WARN, "%s: [qshim] process: %s (policy not used)", policy->name, why);
	return false;
}

struct qs_policy *qs_policy_parse(const char *name, const char *text, size_t length)
{
	struct qs_policy *policy = policy_new();
	if (!policy)
		return NULL;
	snprintf(policy->name, sizeof policy->name, "%s", name);
	if (qs_ini_file(policy, text, length) && policy_finish(policy))
		return policy;
	qs_policy_free(policy);
	return NULL;
}

/* Files -------------------------------------------------------------------------------------- */

static bool file_refused(const char *path, const char *why)
{
	qs_message(QS_LOG_WARN, "%s: %s (policy not used)", path, why);
	return false;
}

ssize_t qs_read_all(int fd, char *text, size_t size)
{
	size_t used = 0;
	while (used < size) {
		ssize_t got = read(fd, text + used, size - used);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -1;
		if (!got)
			break;
		used += (size_t)got;
	}
	return (ssize_t)used;
}

/* Always, at the first reading. */
static bool is_news(struct qs_source *source, const char *text, size_t length)
{
	const uint64_t before = source->hash;
	source->hash = XXH3_64bits(text, length);
	source->same = source->hash == before;
	return !source->same;
}

static bool load_open_file(struct qs_policy *policy, int fd)
{
	struct stat status;
	if (fstat(fd, &status))
		return file_refused(policy->name, strerror(errno));
	if (!S_ISREG(status.st_mode))
		return file_refused(policy->name, "not a regular file");
	if (status.st_size > QS_POLICY_MAX)
		return file_refused(policy->name, "larger than 1 MiB");
	const struct qs_version version = qs_version_of(&status);
	if (!qs_version_is_young(&version))
		policy->source.version = version;
	/* One byte more than it has, so that a file that grows meanwhile is noticed. */
	size_t size = (size_t)status.st_size + 1;
	char *text = malloc(size);
	if (!text)
		return file_refused(policy->name, "out of memory");
	ssize_t length = qs_read_all(fd, text, size);
	bool good;
	if (length < 0)
		good = file_refused(policy->name, strerror(errno));
	else if ((size_t)length == size)
		good = file_refused(policy->name, "it changed while it was read");
	else
		good = is_news(&policy->source, text, (size_t)length) &&
		       qs_ini_file(policy, text, (size_t)length);
	free(text);
	return good;
}

/* The program may change its directory: what is to be looked at again needs the whole path. */
static void follow(struct qs_source *source, const char *path)
{
	char *directory = *path == '/' ? NULL : getcwd(NULL, 0);
	const char *separator = directory ? "/" : "";
	int length = *path == '/' || directory
	                     ? snprintf(source->path, sizeof source->path, "%s%s%s",
	                                directory ? directory : "", separator, path)
	                     : 0;
	if (length >= (int)sizeof source->path)
		*source->path = 0;
	free(directory);
}

static bool load_file(struct qs_policy *policy, const char *path)
{
	/* Non-blocking, because opening a pipe that nobody writes would hang the host. */
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	policy->source.missing = fd < 0;
	if (fd < 0)
		return file_refused(policy->name, strerror(errno));
	bool good = load_open_file(policy, fd);
	close(fd);
	return good;
}

static bool load_first_file(struct qs_policy *policy, const char *path)
{
	snprintf(policy->name, sizeof policy->name, "%s", path);
	if (strlen(path) >= sizeof policy->name)
		return file_refused(policy->name, "the path is too long");
	follow(&policy->source, path);
	return load_file(policy, path);
}

static bool preset_unknown(const char *name)
{
	const char *names[16];
	char list[256] = "";
	size_t count = 0;
	for (; count < 16 && (names[count] = qs_preset_name((int)count)); count++) {
		size_t used = strlen(list);
		snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", names[count]);
	}
	const char *nearest = qs_nearest(name, names, count);
	qs_message(QS_LOG_WARN,
	           "QSHIM_POLICY=%.100s: neither a preset (%s) nor a file, whose name has a '/' or "
	           "ends in '.ini'%s%s%s (policy not used)",
	           name, list, nearest ? "; did you mean '" : "", nearest ? nearest : "",
	           nearest ? "'?" : "");
	return false;
}

static bool load_preset(struct qs_policy *policy, const char *name)
{
	size_t length;
	const char *text = qs_preset_text(name, &length);
	snprintf(policy->name, sizeof policy->name, "preset %s", name);
	policy->preset = true;
	return text ? qs_ini_file(policy, text, length) : preset_unknown(name);
}

static bool is_path(const char *text)
{
	size_t length = strlen(text);
	return strchr(text, '/') || (length >= 4 && !strcmp(text + length - 4, ".ini"));
}

/* What follows the file or preset. */
static bool finish_text(struct qs_policy *policy)
{
	const char *set = policy->source.set;
	if (set && *set && !qs_ini_set(policy, set))
		return false;
	return policy_finish(policy);
}

static bool load_text(struct qs_policy *policy, const char *which)
{
	if (!which || !*which)
		which = "default";
	bool good = is_path(which) ? load_first_file(policy, which) : load_preset(policy, which);
	return good && finish_text(policy);
}

/* Environment -------------------------------------------------------------------------------- */

/* The mode QSHIM asks for; false if it is not set. A word nobody knows means off: a user who wanted
 * to keep qshim from acting must not be overruled by a typing mistake. */
static bool mode_asked(const char *text, struct qs_options *options)
{
	char why[QS_WHY];
	const struct qs_option *option = qs_option_at(qs_option_find("qshim", "mode"));
	if (!text || !*text)
		return false;
	const char *word = !strcmp(text, "0") ? "off" : !strcmp(text, "1") ? "on" : text;
	if (qs_option_set(options, option, word, why))
		return true;
	qs_message(QS_LOG_WARN, "QSHIM=%.60s: %s (taken as off)", text, why);
	options->mode = QS_MODE_OFF;
	return true;
}

/* Returns a bit per option that was given. */
static uint32_t options_from_environment(struct qs_options *options,
                                         char *(*getenv_fn)(const char *))
{
	uint32_t given = 0;
	char why[QS_WHY];
	const struct qs_option *option;
	for (int i = 0; (option = qs_option_at(i)); i++) {
		if (!option->variable || !strcmp(option->variable, "QSHIM"))
			continue;
		const char *text = getenv_fn(option->variable);
		if (!text || !*text)
			continue;
		if (qs_option_set(options, option, text, why))
			given |= UINT32_C(1) << i;
		else
			qs_message(QS_LOG_WARN, "%s=%.60s: %s (ignored)", option->variable, text,
			           why);
	}
	return given;
}

struct qs_policy *qs_policy_load(char *(*getenv_fn)(const char *))
{
	struct qs_policy *policy = policy_new();
	if (!policy)
		return &no_memory;
	int host_errno = errno;
	struct qs_options asked = {.mode = QS_MODE_ON};
	bool mode = mode_asked(getenv_fn("QSHIM"), &asked);
	if (mode && asked.mode == QS_MODE_OFF) {
		policy->options.mode = QS_MODE_OFF;
		errno = host_errno;
		return policy;
	}
	struct qs_source *source = &policy->source;
	const char *set = getenv_fn("QSHIM_SET");
	source->mode_asked = mode;
	source->mode = asked.mode;
	if ((set && !(source->set = strdup(set))) || !load_text(policy, getenv_fn("QSHIM_POLICY")))
		policy_break(policy);
	if (mode)
		policy->options.mode = asked.mode;
	source->from_environment = options_from_environment(&policy->options, getenv_fn);
	errno = host_errno;
	return policy;
}

static void take_environment(struct qs_policy *policy, const struct qs_policy *old)
{
	const struct qs_source *source = &policy->source;
	const struct qs_option *option;
	if (source->mode_asked)
		policy->options.mode = source->mode;
	for (int i = 0; (option = qs_option_at(i)); i++)
		if (source->from_environment >> i & 1)
			memcpy((char *)&policy->options + option->offset,
			       (const char *)&old->options + option->offset, option->size);
}

struct qs_policy *qs_policy_again(struct qs_policy *old)
{
	struct qs_policy *policy = policy_new();
	if (!policy)
		return NULL;
	memcpy(policy->name, old->name, sizeof policy->name);
	policy->source = old->source;
	policy->source.version = (struct qs_version){0};
	policy->source.same = false;
	policy->source.set = old->source.set ? strdup(old->source.set) : NULL;
	if (!policy->source.set != !old->source.set || !load_file(policy, policy->source.path) ||
	    !finish_text(policy)) {
		old->source.hash = policy->source.hash;
		old->source.same = policy->source.same;
		qs_policy_free(policy);
		return NULL;
	}
	take_environment(policy, old);
	return policy;
}

/* The variables that mean something: those of the table, those that choose the policy, and
 * what `qshim run` tells the library. */
static size_t variables_known(const char *names[], size_t size)
{
	size_t count = 0;
	const struct qs_option *option;
	names[count++] = "QSHIM_POLICY";
	names[count++] = "QSHIM_SET";
	names[count++] = "QSHIM_NVTX_NEXT";
	for (int i = 0; (option = qs_option_at(i)) && count < size; i++)
		if (option->variable)
			names[count++] = option->variable;
	return count;
}

void qs_policy_warn_unknown(char *const *environment)
{
	const char *known[40];
	size_t count = variables_known(known, 40);
	for (; environment && *environment; environment++) {
		char name[64];
		size_t length = strcspn(*environment, "=");
		if (strncmp(*environment, "QSHIM", 5) || length >= sizeof name)
			continue;
		snprintf(name, sizeof name, "%.*s", (int)length, *environment);
		bool found = false;
		for (size_t i = 0; i < count; i++)
			found = found || !strcmp(name, known[i]);
		const char *nearest = found ? NULL : qs_nearest(name, known, count);
		if (!found)
			qs_message(QS_LOG_WARN, "unknown variable %s is ignored%s%s%s", name,
			           nearest ? "; did you mean " : "", nearest ? nearest : "",
			           nearest ? "?" : "");
	}
}
