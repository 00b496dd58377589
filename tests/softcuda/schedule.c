/* The queues of the streams and the order in which they run.
 *
 * Work is numbered in the order of submission over all streams. Each piece waits for the one before
 * it in its stream, and for the points it was given: an event, or the default stream. Every point
 * lies in the past, so the oldest waiting piece can always run and nothing ever deadlocks; which of
 * the runnable ones is next is a matter of chance, because on hardware it is too. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* One piece of work in a queue. */
struct sc_op {
	uint64_t number;        /* order of submission                            */
	struct sc_work *work;   /* owned                                          */
	struct sc_point *after; /* other streams' work that must be done before   */
	size_t count;           /* entries of it                                  */
	struct sc_op *next;     /* in the queue                                   */
};

static uint64_t last_number;
static CUstream running; /* whose work ran last, or runs */

struct sc_work *sc_work_new(CUresult (*run)(const void *), const void *args, size_t size,
                            CUgraphNodeType type)
{
	struct sc_work *work = aligned_alloc(16, (sizeof *work + size + 15) / 16 * 16);
	if (!work)
		abort();
	memset(work, 0, sizeof *work);
	work->run = run;
	work->type = type;
	work->size = size;
	if (args)
		memcpy(work->args, args, size);
	return work;
}

void sc_work_free(struct sc_work *work)
{
	if (work->drop)
		work->drop(work->args);
	free(work);
}

struct sc_point sc_last(CUstream stream)
{
	return (struct sc_point){stream, stream->last};
}

bool sc_done(struct sc_point point)
{
	return !point.stream || point.stream->completed >= point.op;
}

static void wait_for(struct sc_op *op, struct sc_point point)
{
	if (sc_done(point))
		return;
	op->after = sc_grow(op->after, (op->count + 1) * sizeof *op->after);
	op->after[op->count++] = point;
}

/* The legacy default stream waits for all blocking streams, and they for it. */
static void order_with_default(struct sc_op *op, CUstream stream)
{
	if (stream->nonblocking)
		return;
	for (CUstream s = sc_streams; s; s = s->next)
		if (s != stream && s->context == stream->context && !s->nonblocking &&
		    (s->legacy || stream->legacy))
			wait_for(op, sc_last(s));
}

void sc_push(CUstream stream, struct sc_work *work, struct sc_point point)
{
	struct sc_op *op = sc_alloc(sizeof *op);
	*op = (struct sc_op){.number = ++last_number, .work = work};
	wait_for(op, point);
	order_with_default(op, stream);
	if (stream->tail)
		stream->tail->next = op;
	else
		stream->head = op;
	stream->tail = op;
	stream->last = op->number;
	softcuda_counters.queued++;
}

CUresult sc_submit(CUstream stream, struct sc_work *work)
{
	if (stream->capture)
		return sc_capture_add(stream, work);
	sc_push(stream, work, (struct sc_point){0});
	return CUDA_SUCCESS;
}

static bool runnable(CUstream stream)
{
	if (!stream->head || stream->busy)
		return false;
	if (stream->head->work->host && softcuda_knobs.hold_host)
		return false;
	for (size_t i = 0; i < stream->head->count; i++)
		if (!sc_done(stream->head->after[i]))
			return false;
	return true;
}

static CUstream choose(void)
{
	CUstream chosen = NULL;
	unsigned seen = 0;
	for (CUstream s = sc_streams; s; s = s->next)
		if (runnable(s) && sc_random() % ++seen == 0)
			chosen = s;
	return chosen;
}

CUresult sc_work_run(const struct sc_work *work)
{
	softcuda_counters.ran++;
	if (!work->host)
		return work->run(work->args);
	sc_unlock();
	CUresult error = work->run(work->args);
	sc_lock();
	return error;
}

static void run_head(CUstream stream)
{
	struct sc_op *op = stream->head;
	stream->head = op->next;
	if (!stream->head)
		stream->tail = NULL;
	stream->busy = true;
	running = stream;
	if (!stream->context->broken)
		stream->context->broken = sc_work_run(op->work);
	stream->busy = false;
	stream->completed = op->number;
	softcuda_counters.queued--;
	sc_work_free(op->work);
	free(op->after);
	free(op);
	sc_wake();
}

static bool run_one(void)
{
	CUstream stream = choose();
	if (stream)
		run_head(stream);
	return stream;
}

/* If nothing is runnable, another thread is inside a host function, or they are held up. */
void sc_run_until(struct sc_point point)
{
	while (!sc_done(point))
		if (!run_one())
			sc_wait();
}

int64_t sc_clock(CUstream stream)
{
	const struct sc_knobs *knobs = &softcuda_knobs;
	struct timespec now;
	if (knobs->product_us || knobs->fp8_us || knobs->second_us || knobs->kernel_us)
		return stream->spent * 1000;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Kernels run with the lock held: the stream that ran last is theirs. */
void softcuda_spend(long us)
{
	running->spent += us;
}

CUresult sc_drain(CUcontext context)
{
	for (CUstream s = sc_streams; s; s = s->next)
		if (s->context == context)
			sc_run_until(sc_last(s));
	return context->broken;
}

void sc_progress(void)
{
	for (unsigned n = 1 + sc_random() % 4; n && run_one(); n--)
		;
}
