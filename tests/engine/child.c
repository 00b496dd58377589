/* Starts scenes and reads what they left; see child.h. Used by one test at a time. */
#define _GNU_SOURCE
#include "child.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "json.h"

#define HEADER_BYTES 256 /* of a counters file */
#define ENV_MAX      32
#define ARG_MAX_     64
#define TIMEOUT      120 /* seconds */

/* A child while it runs. */
struct child {
	pid_t pid;
	int out, err;      /* read ends                      */
	size_t used[2];    /* bytes of out and err read      */
	bool kill_at_line; /* SIGKILL once a line is printed */
};

/* ---- starting ---------------------------------------------------------------------------------
 */

/* The build directory: this program is BUILD/tests/engine/NAME. */
static void build_directory(char *path, size_t size)
{
	const char *build = getenv("QS_TEST_BUILD");
	char self[512] = "";
	ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
	if (build) {
		snprintf(path, size, "%s", build);
		return;
	}
	ck_assert_int_gt(length, 0);
	for (int up = 0; up < 3; up++)
		*strrchr(self, '/') = '\0';
	snprintf(path, size, "%s", self);
}

static void build_environment(const char **all, enum shim shim, const char *const *env,
                              const char *out_dir)
{
	static char preload[1536], out[320], tsan[1024];
	const char *options = getenv("TSAN_OPTIONS");
	char build[512];
	const char *first = getenv("QS_TEST_PRELOAD_FIRST");
	size_t used = 0;
	build_directory(build, sizeof build);
	first = first ? first : "";
	snprintf(preload, sizeof preload, "LD_PRELOAD=%s%s%s/libqshim.so", first, *first ? ":" : "",
	         build);
	snprintf(out, sizeof out, "QSHIM_OUT=%s", out_dir);
	snprintf(tsan, sizeof tsan, "TSAN_OPTIONS=%s", options ? options : "");
	if (shim == SHIMMED) {
		all[used++] = preload;
		all[used++] = out;
	}
	/* An emulation's times decide nothing; test_tune.c asks for them. */
	all[used++] = "QSHIM_SET=tune.budget_ms=0";
	all[used++] = "PATH=/usr/bin:/bin";
	all[used++] = "ASAN_OPTIONS=detect_leaks=0:abort_on_error=0";
	all[used++] = "UBSAN_OPTIONS=print_stacktrace=1";
	all[used++] = tsan;
	while (env && *env && used + 1 < ENV_MAX)
		all[used++] = *env++;
	all[used] = NULL;
}

/* A later NAME=VALUE replaces an earlier one: execve passes both and getenv takes the first. */
static void drop_replaced(const char **all)
{
	for (size_t i = 0; all[i]; i++)
		for (size_t j = i + 1; all[j]; j++)
			if (!strncmp(all[i], all[j], strcspn(all[i], "=") + 1)) {
				all[i] = all[j];
				all[j] = "UNUSED=";
			}
}

static void start(struct child *child, const char **env, const char **arguments)
{
	int out[2], err[2];
	ck_assert_int_eq(pipe2(out, O_CLOEXEC), 0);
	ck_assert_int_eq(pipe2(err, O_CLOEXEC), 0);
	child->pid = fork();
	ck_assert_int_ge(child->pid, 0);
	if (!child->pid) {
		dup2(out[1], STDOUT_FILENO);
		dup2(err[1], STDERR_FILENO);
		execve("/proc/self/exe", (char *const *)arguments, (char *const *)env);
		_exit(127);
	}
	close(out[1]);
	close(err[1]);
	child->out = out[0];
	child->err = err[0];
}

/* ---- waiting ----------------------------------------------------------------------------------
 */

/* Reads what is there; false at the end of the stream. */
static bool drain(int fd, char *into, size_t size, size_t *used)
{
	char rest[4096];
	bool full = *used + 1 >= size;
	ssize_t n = full ? read(fd, rest, sizeof rest) : read(fd, into + *used, size - 1 - *used);
	if (n < 0)
		return errno == EINTR;
	if (!full)
		*used += (size_t)n;
	into[*used] = '\0';
	return n > 0;
}

static void collect(struct child *child, struct outcome *outcome)
{
	struct pollfd fds[2] = {{child->out, POLLIN, 0}, {child->err, POLLIN, 0}};
	char *into[2] = {outcome->out, outcome->err};
	time_t end = time(NULL) + TIMEOUT;
	while (fds[0].fd >= 0 || fds[1].fd >= 0) {
		poll(fds, 2, 1000);
		if (time(NULL) > end) {
			kill(child->pid, SIGKILL);
			ck_abort_msg("the scene does not end; stderr: %s", outcome->err);
		}
		for (int i = 0; i < 2; i++)
			if (fds[i].fd >= 0 && fds[i].revents &&
			    !drain(fds[i].fd, into[i], sizeof outcome->out, &child->used[i])) {
				close(fds[i].fd);
				fds[i].fd = -1;
			}
		if (child->kill_at_line && strchr(outcome->out, '\n')) {
			kill(child->pid, SIGKILL);
			child->kill_at_line = false;
		}
	}
}

static int wait_status(pid_t pid)
{
	int status = 0;
	while (waitpid(pid, &status, 0) < 0)
		ck_assert_int_eq(errno, EINTR);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* ---- reading what it left ---------------------------------------------------------------------
 */

static void read_shadow(struct outcome *outcome, const char *line)
{
	ck_assert_int_lt(outcome->shadows, DECISION_MAX);
	struct shadow *s = &outcome->shadow[outcome->shadows++];
	json_text(line, "key", s->key, sizeof s->key);
	json_text(line, "role", s->role, sizeof s->role);
	json_text(line, "layer", s->layer, sizeof s->layer);
	json_text(line, "candidate", s->candidate, sizeof s->candidate);
	s->checks = (int)json_number(line, "checks", -1);
	s->sqnr = json_number(line, "sqnr", -1);
	s->least = json_number(line, "least", -1);
	s->error = json_number(line, "error", -1);
	s->amax = json_number(line, "amax", -1);
	s->saturated = json_number(line, "saturated", -1);
	s->flushed = json_number(line, "flushed", -1);
}

static void read_decision(struct outcome *outcome, const char *line)
{
	char type[16];
	outcome->broken += !json_complete(line);
	if (!json_text(line, "t", type, sizeof type))
		return;
	if (!strcmp(type, "shadow"))
		read_shadow(outcome, line);
	if (strcmp(type, "decision"))
		return;
	ck_assert_int_lt(outcome->decisions, DECISION_MAX);
	struct decision *d = &outcome->decision[outcome->decisions++];
	json_text(line, "key", d->key, sizeof d->key);
	json_text(line, "api", d->api, sizeof d->api);
	json_text(line, "role", d->role, sizeof d->role);
	json_text(line, "layer", d->layer, sizeof d->layer);
	json_text(line, "rule", d->rule, sizeof d->rule);
	json_text(line, "action", d->action, sizeof d->action);
	json_text(line, "reason", d->reason, sizeof d->reason);
	json_text(line, "scale", d->scale, sizeof d->scale);
	json_text(line, "detail", d->detail, sizeof d->detail);
	json_text(line, "library", d->library, sizeof d->library);
	d->weight = (int)json_number(line, "weight", -1);
}

static void read_log(struct outcome *outcome, FILE *file)
{
	char line[4096];
	outcome->logs++;
	while (fgets(line, sizeof line, file))
		read_decision(outcome, line);
}

static void read_counters(struct outcome *outcome, FILE *file)
{
	outcome->maps++;
	ck_assert_int_eq(fseek(file, HEADER_BYTES, SEEK_SET), 0);
	while (outcome->counters < COUNTER_MAX &&
	       fread(&outcome->counter[outcome->counters], sizeof *outcome->counter, 1, file) ==
	               1 &&
	       outcome->counter[outcome->counters].used)
		outcome->counters++;
}

static void read_file(struct outcome *outcome, const char *directory, const char *name)
{
	char path[600];
	snprintf(path, sizeof path, "%s/%s", directory, name);
	FILE *file = fopen(path, "re");
	ck_assert_msg(file != NULL, "%s: %s", path, strerror(errno));
	if (!strncmp(name, "decisions.", 10))
		read_log(outcome, file);
	if (!strncmp(name, "counters.", 9))
		read_counters(outcome, file);
	fclose(file);
}

static void read_directory(struct outcome *outcome, const char *path)
{
	DIR *directory = opendir(path);
	if (!directory)
		return; /* nothing was written */
	for (struct dirent *entry; (entry = readdir(directory));)
		if (entry->d_name[0] != '.')
			read_file(outcome, path, entry->d_name);
	closedir(directory);
}

/* ---- running ----------------------------------------------------------------------------------
 */

void make_directory(char path[256])
{
	snprintf(path, 256, "/tmp/qshim-engine.XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(path));
}

void remove_directory(const char *path)
{
	char name[600];
	DIR *directory = opendir(path);
	if (!directory)
		return;
	for (struct dirent *entry; (entry = readdir(directory));) {
		snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") && unlink(name))
			remove_directory(name);
	}
	closedir(directory);
	rmdir(path);
}

static void run(struct outcome *outcome, struct child *child, enum shim shim,
                const char *const *env, const char **arguments)
{
	const char *all[ENV_MAX];
	char directory[256], out_dir[300];
	make_directory(directory);
	snprintf(out_dir, sizeof out_dir, "%s/out", directory);
	memset(outcome, 0, sizeof *outcome);
	build_environment(all, shim, env, out_dir);
	drop_replaced(all);
	start(child, all, arguments);
	collect(child, outcome);
	outcome->exit = wait_status(child->pid);
	read_directory(outcome, out_dir);
	remove_directory(directory);
}

void run_scene(struct outcome *outcome, enum shim shim, const char *const *env, const char *scene,
               ...)
{
	const char *arguments[ARG_MAX_] = {"scene", "--scene", scene};
	struct child child = {0};
	va_list more;
	va_start(more, scene);
	for (size_t i = 3; i + 1 < ARG_MAX_ && (arguments[i] = va_arg(more, const char *)); i++)
		;
	va_end(more);
	run(outcome, &child, shim, env, arguments);
}

void run_scene_and_kill(struct outcome *outcome, const char *const *env, const char *scene)
{
	const char *arguments[] = {"scene", "--scene", scene, NULL};
	struct child child = {.kill_at_line = true};
	run(outcome, &child, SHIMMED, env, arguments);
}

/* ---- looking ----------------------------------------------------------------------------------
 */

const struct decision *only_decision(const struct outcome *outcome)
{
	ck_assert_msg(outcome->decisions == 1, "%d decisions, first %s %s; stderr: %s",
	              outcome->decisions, outcome->decision[0].key, outcome->decision[0].reason,
	              outcome->err);
	return &outcome->decision[0];
}

const struct qs_counter *only_counter(const struct outcome *outcome)
{
	ck_assert_msg(outcome->counters == 1, "%d counters, first %s; stderr: %s",
	              outcome->counters, outcome->counter[0].key, outcome->err);
	return &outcome->counter[0];
}

uint64_t total_calls(const struct outcome *outcome)
{
	uint64_t sum = 0;
	for (int i = 0; i < outcome->counters; i++)
		sum += outcome->counter[i].calls;
	return sum;
}

uint64_t total_replaced(const struct outcome *outcome)
{
	uint64_t sum = 0;
	for (int i = 0; i < outcome->counters; i++)
		sum += outcome->counter[i].replaced;
	return sum;
}

uint64_t total_late(const struct outcome *outcome)
{
	uint64_t sum = 0;
	for (int i = 0; i < outcome->counters; i++)
		sum += outcome->counter[i].late;
	return sum;
}

int decisions_with(const struct outcome *outcome, const char *reason)
{
	int count = 0;
	for (int i = 0; i < outcome->decisions; i++)
		count += !strcmp(outcome->decision[i].reason, reason);
	return count;
}

double printed(const struct outcome *outcome, const char *name)
{
	size_t length = strlen(name);
	const char *line = outcome->out;
	while (line && *line) {
		if (!strncmp(line, name, length) && line[length] == ' ')
			return strtod(line + length, NULL);
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	ck_abort_msg("the scene did not print '%s' (exit %d); stdout: %s stderr: %s", name,
	             outcome->exit, outcome->out, outcome->err);
	return 0;
}

int engine_main(int argc, char **argv, Suite *suite)
{
	if (argc < 3 || strcmp(argv[1], "--scene"))
		return qs_suite_main(suite);
	for (const struct scene *scene = scenes; scene->name; scene++)
		if (!strcmp(scene->name, argv[2]))
			return scene->run(argc - 3, argv + 3);
	fprintf(stderr, "no scene %s\n", argv[2]);
	return 126;
}
