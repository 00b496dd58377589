/* Starts programs and reads what they left; see run.h. */
#define _GNU_SOURCE
#include "tests/intercept/run.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/suite.h"

#define LIMIT         120 /* seconds */
#define ENV_MAX       32
#define COUNTER_BYTES 256 /* of the header of a counters file, and of a slot */

static char scratch[64]; /* directory of this test, "" = none yet */

/* All text of one test, given back with its process. */
static char arena[1 << 17];
static size_t arena_used;

__attribute__((format(printf, 1, 2))) static char *text(const char *format, ...)
{
	va_list arguments;
	char *made = arena + arena_used;
	va_start(arguments, format);
	int length = vsnprintf(made, sizeof arena - arena_used, format, arguments);
	va_end(arguments);
	ck_assert_int_ge(length, 0);
	ck_assert_uint_lt((size_t)length, sizeof arena - arena_used);
	arena_used += (size_t)length + 1;
	return made;
}

/* The build directory: this program is BUILD/tests/intercept/NAME. */
static const char *build_directory(void)
{
	const char *build = getenv("QS_TEST_BUILD");
	char self[512] = "";
	if (build)
		return build;
	ck_assert_int_gt(readlink("/proc/self/exe", self, sizeof self - 1), 0);
	for (int up = 0; up < 3; up++)
		*strrchr(self, '/') = '\0';
	return text("%s", self);
}

const char *built(const char *name)
{
	return text("%s/%s%s", build_directory(), strcmp(name, SHIM) ? "intercept/" : "", name);
}

const char *preload_first(void)
{
	const char *first = getenv("QS_TEST_PRELOAD_FIRST");
	return first ? first : "";
}

bool have_toolkit(void)
{
	return access(TOOLKIT_LIB "/libcublas.so.13", R_OK) == 0;
}

const char *scratch_file(const char *name)
{
	if (!*scratch) {
		strcpy(scratch, "/tmp/qshim-intercept-XXXXXX");
		ck_assert_ptr_nonnull(mkdtemp(scratch));
	}
	return text("%s/%s", scratch, name);
}

static void remove_tree(const char *path)
{
	DIR *directory = opendir(path);
	struct dirent *entry;
	while (directory && (entry = readdir(directory))) {
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		char *inner = text("%s/%s", path, entry->d_name);
		if (unlink(inner))
			remove_tree(inner);
	}
	if (directory)
		closedir(directory);
	rmdir(path);
}

void remove_scratch(void)
{
	if (*scratch)
		remove_tree(scratch);
	*scratch = '\0';
}

/* ---- environment ---- */

/* The sanitizer's runtime stays where there is nothing else to preload, so that runs differ in our
 * library only. */
static char *preload_text(const char *names)
{
	char *list = text("%s", preload_first());
	char *rest = text("%s", names ? names : "");
	for (char *name = strtok(rest, ":"); name; name = strtok(NULL, ":"))
		list = text("%s%s%s", list, *list ? ":" : "", built(name));
	return list;
}

static void build_environment(char *env[ENV_MAX], const struct setting *setting)
{
	const char *build = build_directory();
	char *preload = preload_text(setting->preload);
	size_t used = 0;
	env[used++] = text("PATH=%s", getenv("PATH"));
	env[used++] = text("HOME=%s", scratch);
	env[used++] = text("QSHIM_OUT=%s", scratch_file("out"));
	if (setting->cuda == SOFTCUDA)
		env[used++] = text("LD_LIBRARY_PATH=%s/softcuda:%s/softcuda12:%s/intercept", build,
		                   build, build);
	else
		env[used++] = text("LD_LIBRARY_PATH=%s:%s/intercept", TOOLKIT_LIB, build);
	if (*preload)
		env[used++] = text("LD_PRELOAD=%s", preload);
	env[used++] = "ASAN_OPTIONS=detect_leaks=0";
	env[used++] = "UBSAN_OPTIONS=print_stacktrace=1";
	for (const char *const *more = setting->env; more && *more; more++) {
		ck_assert_uint_lt(used + 1, ENV_MAX);
		env[used++] = text("%s", *more);
	}
	env[used] = NULL;
}

/* ---- running ---- */

static void exec_program(const char *const *argv, char *const *env, const char *out,
                         const char *err)
{
	int in = open("/dev/null", O_RDONLY);
	int fds[2] = {open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600),
	              open(err, O_WRONLY | O_CREAT | O_TRUNC, 0600)};
	dup2(in, 0);
	dup2(fds[0], 1);
	dup2(fds[1], 2);
	for (int fd = 3; fd < 64; fd++) /* the test's own must not be seen by what counts files */
		close(fd);
	const char *own = built(argv[0]);
	if (strchr(argv[0], '/') || access(own, X_OK))
		own = argv[0];
	execvpe(own, (char *const *)argv, env);
	_exit(127);
}

/* Exit status or -signal. */
static int wait_for(pid_t pid)
{
	const struct timespec pause = {.tv_nsec = 2000000};
	int status = 0;
	for (long waited = 0; waitpid(pid, &status, WNOHANG) == 0; waited += 2) {
		if (waited > LIMIT * 1000L) {
			kill(pid, SIGKILL);
			waitpid(pid, &status, 0);
			ck_abort_msg("the program ran for more than %d seconds", LIMIT);
		}
		nanosleep(&pause, NULL);
	}
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* Appends a file to a text. */
static void read_text(char *to, const char *path)
{
	size_t used = strlen(to);
	FILE *file = fopen(path, "r");
	if (!file)
		return;
	used += fread(to + used, 1, TEXT_MAX - 1 - used, file);
	to[used] = '\0';
	fclose(file);
}

static void read_counters(struct run *result, const char *path)
{
	struct qs_counter counter;
	FILE *file = fopen(path, "r");
	ck_assert_ptr_nonnull(file);
	ck_assert_uint_eq(sizeof counter, COUNTER_BYTES);
	fseek(file, COUNTER_BYTES, SEEK_SET);
	while (result->counters < COUNTER_MAX && fread(&counter, sizeof counter, 1, file) == 1)
		if (counter.used)
			result->counter[result->counters++] = counter;
	fclose(file);
}

static void read_directory(struct run *result, const char *path)
{
	DIR *directory = opendir(path);
	struct dirent *entry;
	result->wrote = directory != NULL;
	while (directory && (entry = readdir(directory))) {
		char *file = text("%s/%s", path, entry->d_name);
		if (!strncmp(entry->d_name, "decisions.", 10))
			read_text(result->log, file);
		if (!strncmp(entry->d_name, "counters.", 9))
			read_counters(result, file);
	}
	if (directory)
		closedir(directory);
	remove_tree(path);
}

void run(struct run *result, const struct setting *setting, const char *const *argv)
{
	char *env[ENV_MAX];
	const char *out = scratch_file("stdout"), *err = scratch_file("stderr");
	memset(result, 0, sizeof *result);
	build_environment(env, setting);
	pid_t pid = fork();
	ck_assert_int_ge(pid, 0);
	if (!pid)
		exec_program(argv, env, out, err);
	result->status = wait_for(pid);
	read_text(result->out, out);
	read_text(result->err, err);
	read_directory(result, scratch_file("out"));
}

/* ---- reading ---- */

static bool holds(const char *line, const char *format, const char *value)
{
	char part[512];
	if (!value)
		return true;
	snprintf(part, sizeof part, format, value);
	return strstr(line, part) != NULL;
}

int decisions(const struct run *result, const char *api, const char *reason, const char *library)
{
	int count = 0;
	char *copy = strdup(result->log);
	for (char *line = strtok(copy, "\n"); line; line = strtok(NULL, "\n"))
		count += strstr(line, "\"t\":\"decision\"") && holds(line, "\"api\":\"%s\"", api) &&
		         holds(line, "\"reason\":\"%s\"", reason) && holds(line, "%s", library);
	free(copy);
	return count;
}

uint64_t calls(const struct run *result, enum qs_entry entry)
{
	uint64_t sum = 0;
	for (int i = 0; i < result->counters; i++)
		if (result->counter[i].entry == entry)
			sum += result->counter[i].calls;
	return sum;
}
