/* Inside the operand cache.
 *
 * cache.c      see cache.h
 * admission.c  qs_admission_consider qs_admission_done qs_admission_hopeless qs_admission_gone
 * check.c      qs_check_submit qs_check_sample qs_check_hash qs_check_done
 *              qs_work_take qs_work_give
 * memory.c     qs_cache_of qs_caches_forked qs_cache_bucket qs_cache_held qs_cache_freeing
 * qs_cache_drop qs_cache_sweep qs_kept_new qs_kept_free qs_kept_switch_off
 *
 * Locks: a cache's is held for look-ups and changes of what it lists, never over a call of the
 * driver. A copy's is held while a check of it is submitted, so that what its fields say and what
 * its streams were given agree. No thread holds both.
 */
#ifndef QS_OPERAND_KEPT_H
#define QS_OPERAND_KEPT_H

#include "operand/cache.h"
#include "operand/track.h"

#define QS_CACHE_BUCKETS  1024 /* of the table of copies, power of two                   */
#define QS_HELD_BUCKETS   512  /* of those held by graphs, power of two                  */
#define QS_CACHE_COPIES   QS_WATCHES_MAX
#define QS_CANDIDATE_SETS 512 /* power of two                                           */
#define QS_CANDIDATE_WAYS 8
#define QS_CANDIDATES     (QS_CANDIDATE_SETS * QS_CANDIDATE_WAYS)
#define QS_WORKS          8 /* pieces of scratch for hashes that no product pays for  */

/* Scratch of one stream at a time. Under the cache's lock. */
struct qs_work {
	CUdeviceptr base;                      /* struct qs_hash_work                         */
	uint64_t stream;                       /* id of the stream that used it last          */
	uint64_t sequence;                     /* of that use, 0 = not used yet               */
	const struct qs_hash_outcome *outcome; /* where that sequence or a later one appears  */
	bool taken;                            /* a thread is submitting                      */
};

/* A matrix that may become worth keeping. Under the cache's lock. */
struct qs_candidate {
	struct qs_matrix source; /* data = NULL: free                                           */
	uint64_t turn;           /* of the cache, at the last use                               */
	uint64_t distance;       /* turns between the last two uses, 0 = only one so far        */
	uint64_t uses;           /* so far                                                      */
	uint64_t hashed;         /* use at which it was hashed last                             */
	uint64_t next;           /* use from which on it is looked at again                     */
	uint64_t gap;            /* uses between hashes, 0 = they did not differ yet            */
	uint64_t sequence;       /* of the hash whose outcome is due, 0 = none                  */
	uint64_t hash[2];        /* found last                                                  */
	uint32_t equal;          /* hashes in a row that were the same                          */
	bool misjudged;          /* the making found another content than admission    */
	bool infinite;           /* the last one saw NaN or Inf                                 */
	bool making;             /* a thread is making a copy                                   */
};

/* One context's copies. Never freed. */
struct qs_cache {
	struct qs_context *context;
	pthread_mutex_t lock;
	_Atomic uint64_t turn;                    /* look-ups so far                         */
	_Atomic uint64_t sequence;                /* of numbered checks so far               */
	struct qs_kept *bucket[QS_CACHE_BUCKETS]; /* by hash of source and form              */
	struct qs_kept *held[QS_HELD_BUCKETS];    /* those in graphs that read descriptors   */
	struct qs_kept *retired;                  /* dropped, memory not freed yet           */
	bool wanting;                             /* a new copy was wanted: free what is retired */
	uint64_t launches;                /* of graphs while there are any that hold copies */
	_Atomic bool blind;               /* a write was found that was not seen     */
	_Atomic bool reported;            /* a frozen copy was found old             */
	struct qs_hash_outcome *outcomes; /* of candidates, then of copies           */
	uint16_t spare[QS_CACHE_COPIES];  /* indices of free outcomes of copies      */
	int spares;                       /* entries of `spare`                      */
	struct qs_work work[QS_WORKS];
	struct qs_candidate candidate[QS_CANDIDATES];
};

/* Constant after qs_kept_new() unless grouped otherwise. */
struct qs_kept {
	struct qs_cache *cache;
	struct qs_matrix source;
	const struct qs_form *form;
	enum qs_validity level;
	uint64_t check_every; /* uses between audits, 0 = never                     */
	CUdeviceptr block;    /* of `bytes`: record, descriptor, scale, data        */
	size_t bytes;
	CUdeviceptr record, descriptor; /* descriptor = 0 if the form has none                */
	CUdeviceptr scale, data;
	struct qs_hash_outcome *outcome; /* one of the cache's                                 */
	CUevent event;                   /* after the last check or sample                     */
	struct qs_watch *watch;          /* of the source; NULL unless tracked                 */
	uint64_t expected[2];            /* hash at admission, if `admitted` */

	pthread_mutex_t lock;    /* of what follows                                    */
	uint64_t submitted;      /* sequence of the last numbered check, 0 = none yet  */
	uint64_t first;          /* sequence of the making                             */
	uint64_t seen;           /* outcome.sequence read last                         */
	uint64_t stream;         /* id of the stream of the last check or sample       */
	uint64_t capture;        /* id of the capture that was told to hold it last    */
	uint64_t audit;          /* sequence of an audit whose outcome is due, or 0    */
	uint32_t audit_suspects; /* of the watch, when that was submitted              */
	uint64_t changed;        /* times it was found changed                         */
	uint32_t replays;        /* outcome.replays read last                          */
	bool admitted;           /* by its hashes, and the making was not compared with them yet */
	bool due;                /* the watch waits for an outcome                     */
	bool changed_since;      /* a change that the watch was not told of            */
	bool misjudged;          /* the making found another content than admission    */
	bool infinite;           /* the last check saw NaN or Inf                      */
	bool in_graphs;          /* graphs check it when they run                      */
	bool sampled;            /* after the last numbered check                      */
	bool broken;             /* a check could not be submitted                     */
	bool marked;             /* dropped: no use any more, the event tells when idle */

	_Atomic uint64_t uses;    /* so far, by products and by launches of graphs      */
	_Atomic uint64_t checked; /* use of the last check                              */
	_Atomic uint32_t changes; /* outcome.changes read last                          */
	_Atomic uint32_t escapes; /* outcome.escapes read last                          */
	_Atomic int doubt;        /* uses that still verify, see cache.h                */
	_Atomic int users;        /* between find and used; grows under the cache's lock */
	_Atomic int graphs;       /* that hold it                                       */
	_Atomic bool is_off;      /* what switches it off has run                       */

	struct qs_kept *next;      /* in its bucket or among the retired; cache's lock   */
	struct qs_kept *next_held; /* the same                                           */
	uint64_t looked_for;      /* number of the launch of a graph it was looked at before last */
	uint64_t switched_for;    /* the same, switched off before                      */
	_Atomic uint64_t turn;    /* of the cache, at the last use                      */
	bool is_held, is_dropped; /* listed in `held`; no longer in a bucket            */
};

/* The cache of a context, made if new and `stream` is not capturing; else NULL and *why. */
struct qs_cache *qs_cache_of(struct qs_context *context, const struct qs_stream *stream,
                             enum qs_reason *why);
/* Makes the context's kernels known as ours (qs_track_own_function), if they are not. */
void qs_cache_own_kernels(const struct qs_context *context);
/* In a forked child: forget them. */
void qs_caches_forked(void);
/* Head of the list that a copy would be in. Under the cache's lock. */
struct qs_kept **qs_cache_bucket(struct qs_cache *cache, const struct qs_matrix *source,
                                 const struct qs_form *form);
/* The same of the list of those held by graphs. */
struct qs_kept **qs_cache_held(struct qs_cache *cache, CUdeviceptr descriptor);
/* Bytes of retired copies that no graph holds. Under the cache's lock. */
size_t qs_cache_freeing(const struct qs_cache *cache);
/* Takes a copy out of the cache: nobody finds it any more, its memory is freed once nobody uses it.
 */
void qs_cache_drop(struct qs_kept *kept);

/* What is to be done with a matrix of which there is no copy. */
enum qs_admission {
	QS_ADMISSION_WAIT, /* nothing                                              */
	QS_ADMISSION_HASH, /* submit a hash with the candidate's sequence          */
	QS_ADMISSION_MAKE, /* make a copy, then qs_admission_done()                */
};

/* Counts a use of the matrix, under the cache's lock. *candidate is NULL if there is no room. */
enum qs_admission qs_admission_consider(struct qs_cache *cache, const struct qs_matrix *source,
                                        bool frozen, bool capturing,
                                        struct qs_candidate **candidate);
/* The other functions take the lock. The hash or copy asked for was submitted or made, or was not:
 * then the matrix is left alone for so many uses. */
void qs_admission_done(struct qs_cache *cache, struct qs_candidate *candidate, uint64_t pause);
/* A copy of this matrix was dropped: its contents change too often, or are not finite. */
void qs_admission_hopeless(struct qs_cache *cache, const struct qs_matrix *source, bool infinite);
/* The memory is gone: whatever is at the address next is another matrix. */
void qs_admission_gone(struct qs_cache *cache, const struct qs_matrix *source);

/* Submits a check of the copy with these QS_HASH_* flags. The caller holds the copy's lock. */
CUresult qs_check_submit(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                         uint32_t flags);
/* Compares a part of the copy with its source, and makes the copy anew where they differ; of a form
 * that has `sample`, complete or under way in an earlier check, not capturing. Not numbered: what
 * it finds is told by outcome.escapes. The caller holds the copy's lock. */
CUresult qs_check_sample(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work);
/* Submits a hash of a candidate's source. */
CUresult qs_check_hash(struct qs_cache *cache, const struct qs_matrix *source,
                       const struct qs_stream *stream, CUdeviceptr work,
                       struct qs_hash_outcome *outcome, uint64_t sequence);
/* The sequence that has come back, after which the rest of the outcome may be read. */
uint64_t qs_check_done(const struct qs_hash_outcome *outcome);
/* Scratch for this stream, not capturing; NULL if all is in use. */
struct qs_work *qs_work_take(struct qs_cache *cache, const struct qs_stream *stream);
/* After the last check that uses it was submitted. If that failed (`outcome` is NULL) only the same
 * stream gets it again: what was submitted may still run. */
void qs_work_give(struct qs_cache *cache, struct qs_work *work,
                  const struct qs_hash_outcome *outcome, uint64_t sequence);

/* Memory, event and watch of a new copy, in no list yet. `distance`: turns between uses of its
 * source, 0 = not known. NULL and *why if it cannot be. */
struct qs_kept *qs_kept_new(struct qs_cache *cache, const struct qs_matrix *source,
                            const struct qs_form *form, const struct qs_options *options,
                            uint64_t distance, enum qs_reason *why);
/* Gives back what qs_kept_new() took, for a copy that was never used. */
void qs_kept_free(struct qs_kept *kept);
/* Makes a graph that is launched into this stream after this call, and that reads the descriptor of
 * a dropped copy, compute from the source. */
void qs_kept_switch_off(struct qs_kept *kept, const struct qs_stream *stream);
/* Goes on with freeing what is retired, in a stream that is not capturing. */
void qs_cache_sweep(struct qs_cache *cache, const struct qs_stream *stream);

#endif
