/* Buckets of token counts, their texts, and the uses that are counted for them. */
#include <pthread.h>
#include <string.h>

#include "plan/plan.h"
#include "tests/support/suite.h"
#include "tests/unit/key.h"

/* Tight, as a linear layer makes it. */
static struct qs_key key_of(enum qs_role role, cublasOperation_t ta, cublasOperation_t tb,
                            int64_t m, int64_t n, int64_t k)
{
	struct qs_key key = plain_key(m, n, k);
	key.lda = ta == CUBLAS_OP_N ? m : k;
	key.ldb = tb == CUBLAS_OP_N ? k : n;
	key.ta = (uint8_t)ta;
	key.tb = (uint8_t)tb;
	key.role = (uint8_t)role;
	return key;
}

static struct qs_key forward(int64_t tokens)
{
	return key_of(QS_ROLE_FWD, CUBLAS_OP_T, CUBLAS_OP_N, 512, tokens, 256);
}

START_TEST(buckets_are_exact_up_to_16)
{
	for (int64_t tokens = 0; tokens <= 16; tokens++) {
		const struct qs_bucket bucket = qs_bucket_of(tokens);
		ck_assert_int_eq(bucket.first, tokens);
		ck_assert_int_eq(bucket.last, tokens);
	}
}
END_TEST

START_TEST(buckets_follow_each_other_in_steps_of_a_quarter)
{
	struct qs_bucket before = qs_bucket_of(16);
	for (int64_t tokens = 17; tokens < 200000; tokens++) {
		const struct qs_bucket bucket = qs_bucket_of(tokens);
		ck_assert(bucket.first <= tokens && tokens <= bucket.last);
		if (bucket.first == before.first)
			continue;
		ck_assert_int_eq(bucket.first, before.last + 1);
		ck_assert_int_eq(bucket.last, before.last + before.last / 4);
		before = bucket;
	}
	ck_assert_int_eq(qs_bucket_of(4096).first, 3946);
	ck_assert_int_eq(qs_bucket_of(INT64_MAX).last, INT64_MAX);
}
END_TEST

static void ck_text(const struct qs_key *key, const char *expected)
{
	char text[160];
	ck_assert_uint_eq(qs_bucket_text(key, text, sizeof text), strlen(expected));
	ck_assert_str_eq(text, expected);
}

START_TEST(text_of_a_bucket_has_its_range)
{
	struct qs_key key = forward(18);
	ck_text(&key, "TN m=512 n=17..20 k=256 bf16 fwd");
	key = forward(16);
	ck_text(&key, "TN m=512 n=16 k=256 bf16 fwd");
	key = key_of(QS_ROLE_DGRAD, CUBLAS_OP_N, CUBLAS_OP_N, 256, 20, 512);
	ck_text(&key, "NN m=256 n=17..20 k=512 bf16 dgrad");
	key = key_of(QS_ROLE_WGRAD, CUBLAS_OP_N, CUBLAS_OP_T, 256, 512, 21);
	ck_text(&key, "NT m=256 n=512 k=21..25 bf16 wgrad");
	key = key_of(QS_ROLE_UNKNOWN, CUBLAS_OP_T, CUBLAS_OP_N, 512, 18, 256);
	ck_text(&key, "TN m=512 n=18 k=256 bf16");
}
END_TEST

/* Tight leading dimensions say nothing of their own, others do. */
START_TEST(leading_dimensions_follow_the_tokens)
{
	struct qs_key key = key_of(QS_ROLE_FWD, CUBLAS_OP_T, CUBLAS_OP_T, 512, 18, 256);
	ck_text(&key, "TT m=512 n=17..20 k=256 bf16 fwd");
	key.ldb = 24;
	ck_text(&key, "TT m=512 n=17..20 k=256 bf16 ldb=24 fwd");
	key = key_of(QS_ROLE_WGRAD, CUBLAS_OP_T, CUBLAS_OP_N, 256, 512, 21);
	ck_text(&key, "TN m=256 n=512 k=21..25 bf16 wgrad");
	key.lda = 32;
	ck_text(&key, "TN m=256 n=512 k=21..25 bf16 lda=32 wgrad");
}
END_TEST

/* Where another size is as large as the token count is. */
START_TEST(leading_dimensions_of_other_sizes_stay)
{
	static const struct {
		enum qs_role role;
		cublasOperation_t ta, tb;
		int64_t m, n, k, lda, ldb; /* lda, ldb: of the bucket */
	} rows[] = {
	        {QS_ROLE_WGRAD, CUBLAS_OP_N, CUBLAS_OP_T, 18, 512, 18, 18, 512},
	        {QS_ROLE_WGRAD, CUBLAS_OP_N, CUBLAS_OP_T, 256, 18, 18, 256, 18},
	        {QS_ROLE_WGRAD, CUBLAS_OP_T, CUBLAS_OP_N, 256, 512, 18, 20, 20},
	        {QS_ROLE_FWD, CUBLAS_OP_T, CUBLAS_OP_N, 512, 18, 18, 18, 18},
	        {QS_ROLE_FWD, CUBLAS_OP_T, CUBLAS_OP_T, 512, 18, 256, 256, 20},
	};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		const struct qs_key key = key_of(rows[i].role, rows[i].ta, rows[i].tb, rows[i].m,
		                                 rows[i].n, rows[i].k);
		const struct qs_key bucket = qs_bucket_key(&key);
		ck_assert_msg(bucket.lda == rows[i].lda && bucket.ldb == rows[i].ldb,
		              "row %zu: lda %lld, ldb %lld", i, (long long)bucket.lda,
		              (long long)bucket.ldb);
	}
}
END_TEST

START_TEST(a_product_whose_tokens_are_unknown_has_a_bucket_of_its_own)
{
	const struct qs_key key = key_of(QS_ROLE_UNKNOWN, CUBLAS_OP_T, CUBLAS_OP_N, 512, 18, 256);
	const struct qs_key bucket = qs_bucket_key(&key);
	ck_assert_mem_eq(&bucket, &key, sizeof key);
}
END_TEST

START_TEST(keys_of_a_bucket_have_one_key)
{
	struct qs_key x = forward(18), y = forward(20), z = forward(21);
	x.layer = 1;
	y.weight = 2;
	const struct qs_key a = qs_bucket_key(&x), b = qs_bucket_key(&y), c = qs_bucket_key(&z);
	ck_assert_mem_eq(&a, &b, sizeof a);
	ck_assert_mem_ne(&a, &c, sizeof a);
}
END_TEST

START_TEST(uses_count_up_to_what_is_asked_for)
{
	struct qs_key key = forward(1);
	qs_uses_forked();
	for (int i = 1; i <= 5; i++)
		ck_assert_int_eq(qs_uses_add(&key), i < 3 ? i : 3);
	key = forward(2);
	ck_assert_int_eq(qs_uses_add(&key), 1);
	key.layer = 7;
	ck_assert_int_eq(qs_uses_add(&key), 2);
	qs_uses_forked();
	ck_assert_int_eq(qs_uses_add(&key), 1);
}
END_TEST

/* A key of its own for each number. */
static struct qs_key numbered(int number)
{
	struct qs_key key = forward(1);
	key.k = key.lda = key.ldb = number;
	return key;
}

/* How many of the first keys are counted as used once. */
static int used_once(int keys)
{
	int counted = 0;
	for (int i = 1; i <= keys; i++) {
		const struct qs_key key = numbered(i);
		const int uses = qs_uses_add(&key);
		ck_assert(uses == 1 || uses == QS_USES_TO_MEASURE);
		counted += uses == 1;
	}
	return counted;
}

START_TEST(a_bucket_without_room_does_not_wait)
{
	qs_uses_forked();
	const int counted = used_once(10000);
	ck_assert_int_gt(counted, 3000);
	ck_assert_int_le(counted, 4096);
	qs_uses_forked(); /* all of it */
	ck_assert_int_eq(used_once(10000), counted);
	qs_uses_forked();
}
END_TEST

#define THREADS 4
#define KEYS    2000
#define ROUNDS  20

static _Atomic int times[KEYS][QS_USES_TO_MEASURE + 1];
static pthread_barrier_t together;

static void *use_all(void *unused)
{
	for (int i = 0; i < KEYS; i++) {
		const struct qs_key key = numbered(i + 1);
		if (i % 20 == 0)
			pthread_barrier_wait(&together);
		times[i][qs_uses_add(&key)]++;
	}
	return unused;
}

/* Each number but the last is given to one thread only, or a bucket would be measured too late. */
START_TEST(uses_of_several_threads_are_all_counted)
{
	pthread_t thread[THREADS];
	pthread_barrier_init(&together, NULL, THREADS);
	for (int round = 1; round <= ROUNDS; round++) {
		qs_uses_forked();
		for (int i = 0; i < THREADS; i++)
			ck_assert_int_eq(pthread_create(&thread[i], NULL, use_all, NULL), 0);
		for (int i = 0; i < THREADS; i++)
			pthread_join(thread[i], NULL);
		for (int i = 0; i < KEYS; i++)
			for (int use = 1; use < QS_USES_TO_MEASURE; use++)
				ck_assert_msg(times[i][use] == round,
				              "key %d: use %d seen %d times in %d rounds", i, use,
				              times[i][use], round);
	}
	qs_uses_forked();
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("buckets");
	TCase *tcase = tcase_create("buckets");
	tcase_add_test(tcase, buckets_are_exact_up_to_16);
	tcase_add_test(tcase, buckets_follow_each_other_in_steps_of_a_quarter);
	tcase_add_test(tcase, text_of_a_bucket_has_its_range);
	tcase_add_test(tcase, leading_dimensions_follow_the_tokens);
	tcase_add_test(tcase, leading_dimensions_of_other_sizes_stay);
	tcase_add_test(tcase, a_product_whose_tokens_are_unknown_has_a_bucket_of_its_own);
	tcase_add_test(tcase, keys_of_a_bucket_have_one_key);
	tcase_add_test(tcase, uses_count_up_to_what_is_asked_for);
	tcase_add_test(tcase, a_bucket_without_room_does_not_wait);
	tcase_add_test(tcase, uses_of_several_threads_are_all_counted);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
