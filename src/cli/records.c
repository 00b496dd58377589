/* Reads the folder of a run: its counters files, and by log.c its decision logs.
 *
 * A run may still be going on: what is read is what was there a moment ago. Counters are joined to
 * the log by the number of the slot that each line of the log names, if the products' names agree,
 * as containers whose programs all have pid 1 write into one log. */
#define _GNU_SOURCE
#include "cli/records.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX       ((off_t)64 << 20) /* of counters: four times what 65536 keys take */
#define LINE_MAX_BYTES 65536             /* of a log: eight times the longest that is written */

/* ---- counters ------------------------------------------------------------------------------- */

size_t qs_records_process(const struct qs_records *records, const char *name, size_t from)
{
	while (from < records->process_count && strcmp(records->processes[from].name, name) != 0)
		from++;
	return from;
}

static struct qs_process_record *add_process(struct qs_records *records, const char *name)
{
	struct qs_process_record *grown =
	        qs_grow(records->processes, records->process_count, sizeof *grown);
	if (!grown)
		return NULL;
	records->processes = grown;
	struct qs_process_record *process = &grown[records->process_count++];
	memset(process, 0, sizeof *process);
	qs_copy_text(process->name, sizeof process->name, name, strlen(name));
	process->first = records->product_count;
	return process;
}

static void clean(char *text, size_t size)
{
	char copy[256];
	qs_copy_text(copy, size < sizeof copy ? size : sizeof copy, text, size);
	memcpy(text, copy, size);
}

/* A slot that another version or a fault made is left out. */
static bool add_product(struct qs_records *records, const struct qs_counter *slot)
{
	struct qs_product_record *grown =
	        qs_grow(records->products, records->product_count, sizeof *grown);
	if (!grown)
		return false;
	records->products = grown;
	struct qs_product_record *product = &grown[records->product_count++];
	memset(product, 0, sizeof *product);
	memcpy(&product->is, slot, sizeof product->is);
	product->process = records->process_count - 1;
	struct qs_counter *is = &product->is;
	is->used = is->used == 1 && is->action < QS_ACTION_COUNT && is->reason < QS_REASON_COUNT &&
	           is->role < QS_ROLE_COUNT && is->entry < QS_ENTRY_COUNT && is->flops >= 0;
	clean(is->key, sizeof is->key);
	clean(is->rule, sizeof is->rule);
	clean(is->layer, sizeof is->layer);
	memcpy(product->layer, is->layer, sizeof is->layer);
	return true;
}

/* NULL, or what is wrong. */
static const char *check_header(const struct qs_counter_header *header, size_t size)
{
	if (size < sizeof *header ||
	    memcmp(header->magic, QS_COUNTER_MAGIC, sizeof header->magic) != 0)
		return "not a counters file";
	if (header->version != QS_COUNTER_VERSION || header->slot_size != sizeof(struct qs_counter))
		return "of another version of qshim";
	if (!header->slots || (size - sizeof *header) / sizeof(struct qs_counter) < header->slots)
		return "shorter than it says";
	return NULL;
}

/* Slots from the start, and behind them "other". */
static bool add_products(struct qs_records *records, const struct qs_counter_header *header,
                         const struct qs_counter *slots)
{
	const uint32_t last = header->slots - 1, used = header->used < last ? header->used : last;
	bool added = true;
	for (uint32_t i = 0; i < used && added; i++)
		added = add_product(records, &slots[i]);
	return added && add_product(records, &slots[last]);
}

const char *qs_counters_add(struct qs_records *records, const char *name, const void *data,
                            size_t size)
{
	const struct qs_counter_header *header = data;
	const char *wrong = check_header(header, size);
	if (wrong)
		return wrong;
	struct qs_process_record *process = add_process(records, name);
	if (!process)
		return "no memory";
	memcpy(&process->header, header, sizeof *header);
	clean(process->header.exe, sizeof process->header.exe);
	clean(process->header.program, sizeof process->header.program);
	const bool added = add_products(records, header, (const struct qs_counter *)(header + 1));
	process = &records->processes[records->process_count - 1];
	process->count = records->product_count - process->first;
	return added ? NULL : "no memory";
}

/* ---- files ---------------------------------------------------------------------------------- */

/* RANK.PID of "counters.RANK.PID.bin", also of "counters.RANK.PID.2.bin"; false if it is none. */
static bool name_of(const char *file, const char *prefix, const char *suffix, char name[64])
{
	const size_t length = strlen(file), before = strlen(prefix), after = strlen(suffix);
	unsigned rank, pid;
	if (length < before + after || strncmp(file, prefix, before) != 0 ||
	    strcmp(file + length - after, suffix) != 0 ||
	    sscanf(file + before, "%9u.%9u.", &rank, &pid) != 2)
		return false;
	snprintf(name, 64, "%u.%u", rank, pid);
	return true;
}

/* A regular file of the folder, -1 and a complaint if it is none. */
static int open_file(int folder, const char *name, struct stat *status)
{
	const int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	int error = fd < 0 ? errno : 0;
	if (!error && fstat(fd, status))
		error = errno;
	if (!error && !S_ISREG(status->st_mode))
		error = EINVAL;
	if (!error)
		return fd;
	fprintf(stderr, "qshim: %s: %s\n", name, strerror(error));
	if (fd >= 0)
		close(fd);
	return -1;
}

/* What is there of the file; the size is set to it. NULL and errno if it cannot be read. */
static void *read_all(int fd, size_t *size)
{
	char *data = malloc(*size + 1);
	size_t got = 0;
	ssize_t more = 1;
	while (data && got < *size && (more = read(fd, data + got, *size - got)) > 0)
		got += (size_t)more;
	if (more < 0) {
		free(data);
		return NULL;
	}
	*size = got;
	return data;
}

static bool read_counters(struct qs_records *records, int folder, const char *file,
                          const char *name)
{
	struct stat status;
	const int fd = open_file(folder, file, &status);
	if (fd < 0)
		return false;
	size_t size = (size_t)(status.st_size < FILE_MAX ? status.st_size : FILE_MAX);
	void *data = read_all(fd, &size);
	const char *wrong = data ? qs_counters_add(records, name, data, size) : strerror(errno);
	if (wrong)
		fprintf(stderr, "qshim: %s: %s\n", file, wrong);
	free(data);
	close(fd);
	return !wrong;
}

/* A line without an end is being written, or was when its process was killed. */
static bool read_lines(struct qs_records *records, const char *name, FILE *from)
{
	static char line[LINE_MAX_BYTES];
	bool fits = true, whole = true;
	while (fits && fgets(line, sizeof line, from)) {
		const size_t length = strlen(line);
		const bool ended = length && line[length - 1] == '\n', begun = whole;
		whole = ended;
		if (begun && ended)
			fits = qs_log_add(records, name, line, length);
		else
			records->unread += ended;
	}
	return fits;
}

/* The process of a log whose counters are not there. */
static bool know_process(struct qs_records *records, const char *name)
{
	if (qs_records_process(records, name, 0) < records->process_count)
		return true;
	struct qs_process_record *process = add_process(records, name);
	if (process)
		sscanf(name, "%d.%d", &process->header.rank, &process->header.pid);
	return process;
}

static bool read_log(struct qs_records *records, int folder, const char *file, const char *name)
{
	struct stat status;
	const int fd = open_file(folder, file, &status);
	FILE *from = fd < 0 ? NULL : fdopen(fd, "r");
	if (!from) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	const bool read = know_process(records, name) && read_lines(records, name, from);
	if (!read)
		fprintf(stderr, "qshim: %s: no memory\n", file);
	fclose(from);
	return read;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
	return strverscmp((*a)->d_name, (*b)->d_name);
}

/* Files of one kind; counters before the logs that refer to them. Returns how many were read. */
static size_t read_kind(struct qs_records *records, int folder, struct dirent **files, int count,
                        bool logs)
{
	char name[64];
	size_t read = 0;
	for (int i = 0; i < count; i++) {
		const char *file = files[i]->d_name;
		if (logs && name_of(file, "decisions.", ".jsonl", name))
			read += read_log(records, folder, file, name);
		else if (!logs && name_of(file, "counters.", ".bin", name))
			read += read_counters(records, folder, file, name);
	}
	return read;
}

bool qs_records_read(const char *folder, struct qs_records *records)
{
	struct dirent **files;
	memset(records, 0, sizeof *records);
	const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	const int count = fd < 0 ? -1 : scandirat(fd, ".", &files, NULL, by_name);
	size_t read = 0;
	if (count < 0) {
		fprintf(stderr, "qshim: %s: %s\n", folder, strerror(errno));
	} else {
		read = read_kind(records, fd, files, count, false);
		read += read_kind(records, fd, files, count, true);
		qs_log_end(records);
		if (!read)
			fprintf(stderr,
			        "qshim: %s: no counters or decisions are there: was it the "
			        "QSHIM_OUT of a program that made products?\n",
			        folder);
		for (int i = 0; i < count; i++)
			free(files[i]);
		free(files);
	}
	if (fd >= 0)
		close(fd);
	return read > 0;
}

void qs_records_free(struct qs_records *records)
{
	free(records->processes);
	free(records->products);
	free(records->shadows);
	memset(records, 0, sizeof *records);
}
