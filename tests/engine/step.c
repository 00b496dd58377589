/* Steps of a scene; see step.h. */
#include "step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

/* ---- in scenes ----------------------------------------------------------------------------------
 */

/* What is counted for each kind, ended by NULL. */
static const char *const counters[LAUNCHES][5] = {
        [PACKS4] = {"kernel:qs_nf4_pack"},
        [PACKS8] = {"kernel:qs_fp8_pack"},
        [EXPANSIONS] = {"kernel:qs_nf4_expand"},
        [THIN4] = {"kernel:qs_w4a16_8", "kernel:qs_w4a16_16", "kernel:qs_w4a16_32"},
        [THIN8] = {"kernel:qs_w8a16_8", "kernel:qs_w8a16_16", "kernel:qs_w8a16_32"},
        [WIDE4] = {"kernel:qs_w4a16_wide_64", "kernel:qs_w4a16_wide_128"},
        [HASHES] = {"kernel:qs_hash"},
        [SAMPLES] = {"kernel:qs_nf4_sample", "kernel:qs_fp8_sample"},
        [CASTS] = {"kernel:qs_quantise"},
        [EARLY] = {"early_reads"},
        [FP8] = {"products_fp8"},
        [BF16] = {"products_bf16"},
};

static long launched(int kind)
{
	long sum = 0;
	for (const char *const *counter = counters[kind]; *counter; counter++) {
		const long count = softcuda_get(*counter);
		sum += count > 0 ? count : 0;
	}
	return sum;
}

/* The counters file of this process, QSHIM_OUT/counters.RANK.PID.bin. */
static FILE *open_counters(void)
{
	const char *directory = getenv("QSHIM_OUT");
	char path[512];
	snprintf(path, sizeof path, "%s/counters.0.%d.bin", directory ? directory : "",
	         (int)getpid());
	return fopen(path, "re");
}

static long bytes_written(FILE *file)
{
	struct qs_counter counter;
	long sum = 0;
	while (fread(&counter, sizeof counter, 1, file) == 1 && counter.used)
		sum += (long)counter.bytes;
	return sum;
}

/* Everything so far; all zero before the library's first product. */
static void look(struct step *now)
{
	struct qs_counter_header header;
	FILE *file = open_counters();
	*now = (struct step){.sqnr = 0};
	for (int kind = 0; kind < LAUNCHES; kind++)
		now->launches[kind] = launched(kind);
	if (!file)
		return;
	must(fread(&header, sizeof header, 1, file) != 1, "the counters file is short");
	now->written = bytes_written(file);
	for (int form = 0; form < QS_KEPT_FORMS; form++) {
		now->bytes[form] = (long)header.kept_bytes[form];
		now->uses[form] = (long)header.kept_uses[form];
		now->escapes[form] = (long)header.kept_escapes[form];
	}
	fclose(file);
}

static struct step before;

void step_begin(void)
{
	look(&before);
}

void step_begin_capture(const struct session *session)
{
	must((int)cudaStreamBeginCapture(session->stream, cudaStreamCaptureModeRelaxed), "begin");
}

cudaGraphExec_t step_end_capture(const struct session *session)
{
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	must((int)cudaStreamEndCapture(session->stream, &graph), "end");
	must((int)cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must((int)cudaGraphDestroy(graph), "destroy");
	return executable;
}

void step_submit(struct made *made, const struct session *session)
{
	must((int)product_call(made, session), "product");
}

static void print_since(const long *now, const long *then, int size)
{
	for (int i = 0; i < size; i++)
		printf(" %ld", now[i] - (then ? then[i] : 0));
}

void step_print(struct made *made)
{
	struct step now;
	product_fetch(made);
	look(&now);
	printf("step %.2f %d", product_sqnr(made), product_spoilt_exactly(made));
	print_since(now.launches, before.launches, LAUNCHES);
	print_since(&now.written, &before.written, 1);
	print_since(now.uses, before.uses, QS_KEPT_FORMS);
	print_since(now.escapes, before.escapes, QS_KEPT_FORMS);
	print_since(now.bytes, NULL, QS_KEPT_FORMS);
	printf("\n");
	before = now;
}

void step_call(struct made *made, const struct session *session)
{
	product_poison(made);
	step_submit(made, session);
	step_print(made);
}

void other_product(const struct session *session)
{
	static const struct product shape = {.ta = CUBLAS_OP_T, .m = 8, .n = 8, .k = 8};
	struct made made;
	product_make(&made, &shape, 1);
	step_submit(&made, session);
	product_fetch(&made);
	product_free(&made);
}

/* ---- in tests -----------------------------------------------------------------------------------
 */

static const char *line_of(const struct outcome *outcome, int index)
{
	const char *line = outcome->out;
	while (line && *line) {
		if (!strncmp(line, "step ", strlen("step ")) && !index--)
			return line + strlen("step ");
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	return NULL;
}

int steps(const struct outcome *outcome)
{
	int count = 0;
	while (line_of(outcome, count))
		count++;
	return count;
}

static const char *read_counts(const char *text, long *counts, int size)
{
	char *end = (char *)text;
	for (int i = 0; i < size; i++)
		counts[i] = strtol(end, &end, 10);
	return end;
}

struct step step_at(const struct outcome *outcome, int index)
{
	struct step step;
	char *text;
	const char *line = line_of(outcome, index);
	ck_assert_msg(line != NULL, "no step %d (exit %d): %s%s", index, outcome->exit,
	              outcome->out, outcome->err);
	step.sqnr = strtod(line, &text);
	line = read_counts(text, &step.spoilt, 1);
	line = read_counts(line, step.launches, LAUNCHES);
	line = read_counts(line, &step.written, 1);
	line = read_counts(line, step.uses, QS_KEPT_FORMS);
	line = read_counts(line, step.escapes, QS_KEPT_FORMS);
	read_counts(line, step.bytes, QS_KEPT_FORMS);
	return step;
}
