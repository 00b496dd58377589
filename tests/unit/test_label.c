/* Layer names: ranges of threads, the table of names and its bounds, and how backward products find
 * the layer of their forward product. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "plan/label.h"
#include "plan/plan.h"
#include "tests/support/suite.h"
#include "tests/unit/key.h"

/* Addresses that are never read. */
#define W1 ((void *)0x7f0000000000)
#define W2 ((void *)0x7f0000100000)
#define X1 ((void *)0x7f0000200000)
#define X2 ((void *)0x7f0000300000)
#define DY ((void *)0x7f0000400000)

static const char a_domain, another_domain;

static const char *current(void)
{
	return qs_label_name(qs_label_current());
}

/* ---- ranges -------------------------------------------------------------------------------------
 */

START_TEST(nothing_is_named_before_the_first_range)
{
	ck_assert(!qs_labels_used());
	ck_assert_ptr_null(current());
	qs_label_pop();
	ck_assert(!qs_labels_used());
	qs_label_push("a");
	ck_assert(qs_labels_used());
}
END_TEST

START_TEST(innermost_range_names)
{
	qs_label_push("block");
	ck_assert_str_eq(current(), "block");
	qs_label_push("block.mlp");
	ck_assert_str_eq(current(), "block.mlp");
	qs_label_pop();
	ck_assert_str_eq(current(), "block");
	qs_label_pop();
	ck_assert_ptr_null(current());
	qs_label_pop();
	qs_label_push("again");
	ck_assert_str_eq(current(), "again");
}
END_TEST

START_TEST(nameless_range_has_the_name_around_it)
{
	qs_label_push(NULL);
	ck_assert_ptr_null(current());
	qs_label_push("block");
	qs_label_push("");
	qs_label_push(NULL);
	ck_assert_str_eq(current(), "block");
}
END_TEST

START_TEST(depth_is_told_from_zero)
{
	ck_assert_int_eq(qs_label_leave(&a_domain), -1);
	ck_assert_int_eq(qs_label_enter(&a_domain, "a"), 0);
	ck_assert_int_eq(qs_label_enter(&a_domain, "b"), 1);
	ck_assert_int_eq(qs_label_leave(&a_domain), 1);
	ck_assert_int_eq(qs_label_leave(&a_domain), 0);
	ck_assert_int_eq(qs_label_leave(&a_domain), -1);
}
END_TEST

START_TEST(domains_may_overlap)
{
	qs_label_enter(&a_domain, "a");
	qs_label_enter(&another_domain, "b");
	ck_assert_int_eq(qs_label_leave(&a_domain), 0);
	ck_assert_str_eq(current(), "b");
	ck_assert_int_eq(qs_label_leave(&a_domain), -1);
	qs_label_leave(&another_domain);
	ck_assert_ptr_null(current());
}
END_TEST

START_TEST(ranges_beyond_the_bound_have_the_last_name)
{
	char name[16];
	for (int i = 0; i < QS_LABEL_DEPTH + 5; i++) {
		snprintf(name, sizeof name, "r%d", i);
		ck_assert_int_eq(qs_label_enter(&a_domain, name), i);
	}
	snprintf(name, sizeof name, "r%d", QS_LABEL_DEPTH - 1);
	ck_assert_str_eq(current(), name);
	for (int i = QS_LABEL_DEPTH + 4; i >= QS_LABEL_DEPTH; i--)
		ck_assert_int_eq(qs_label_leave(&a_domain), i);
	ck_assert_str_eq(current(), name);
	for (int i = QS_LABEL_DEPTH - 1; i > 0; i--)
		ck_assert_int_eq(qs_label_leave(&a_domain), i);
	ck_assert_str_eq(current(), "r0");
}
END_TEST

START_TEST(overlong_name_loses_its_end)
{
	char name[3 * QS_LABEL_LENGTH];
	memset(name, 'x', sizeof name - 1);
	name[sizeof name - 1] = '\0';
	qs_label_push(name);
	ck_assert_uint_eq(strlen(current()), QS_LABEL_LENGTH - 1);
	ck_assert_int_eq(strncmp(current(), name, QS_LABEL_LENGTH - 1), 0);
}
END_TEST

START_TEST(same_name_is_same_number)
{
	char name[] = "block";
	qs_label_push(name);
	uint16_t first = qs_label_current();
	name[0] = 'c'; /* the name was copied */
	qs_label_push("clock");
	ck_assert_uint_ne(qs_label_current(), first);
	qs_label_pop();
	qs_label_push("block");
	ck_assert_uint_eq(qs_label_current(), first);
	ck_assert_uint_ne(first, 0);
}
END_TEST

START_TEST(names_beyond_the_bound_are_none)
{
	char name[16];
	for (int i = 0; i < QS_LABELS_MAX; i++) {
		snprintf(name, sizeof name, "n%d", i);
		qs_label_push(name);
		ck_assert_str_eq(current(), name);
		qs_label_pop();
	}
	qs_label_push("one more");
	ck_assert_uint_eq(qs_label_current(), 0);
	qs_label_pop();
	qs_label_push("n77");
	ck_assert_str_eq(current(), "n77");
	ck_assert_ptr_null(qs_label_name(UINT16_MAX));
}
END_TEST

static void *other_thread(void *argument)
{
	(void)argument;
	ck_assert_ptr_null(current());
	qs_label_push("other");
	ck_assert_str_eq(current(), "other");
	return NULL; /* its ranges are left open */
}

START_TEST(threads_have_ranges_of_their_own)
{
	qs_label_push("main");
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		ck_assert_int_eq(pthread_create(&thread, NULL, other_thread, NULL), 0);
		pthread_join(thread, NULL);
		ck_assert_str_eq(current(), "main");
	}
}
END_TEST

static void *name_many(void *argument)
{
	uint16_t *labels = argument;
	for (int i = 0; i < 1000; i++) {
		char name[16];
		snprintf(name, sizeof name, "n%d", i);
		qs_label_push(name);
		labels[i] = qs_label_current();
		qs_label_pop();
	}
	return NULL;
}

START_TEST(threads_agree_on_numbers)
{
	static uint16_t labels[4][1000];
	pthread_t threads[4];
	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, name_many, labels[i]), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	for (int i = 1; i < 4; i++)
		ck_assert_mem_eq(labels[i], labels[0], sizeof labels[0]);
}
END_TEST

/* ---- layers of products -------------------------------------------------------------------------
 */

/* The layer that a product of this role and shape is given. */
static const char *layer_of(enum qs_role role, bool autograd, int64_t m, int64_t n, int64_t k,
                            void *a, void *b)
{
	struct qs_gemm g = {.key = plain_key(m, n, k), .a = a, .b = b};
	g.key.role = (uint8_t)role;
	return qs_label_name(qs_layer_of(&g, autograd));
}

/* Y = X W of a layer with 256 inputs and 128 outputs, 64 tokens. */
static const char *forward(const char *name, void *w, void *x)
{
	qs_label_push(name);
	const char *layer = layer_of(QS_ROLE_FWD, false, 128, 64, 256, w, x);
	qs_label_pop();
	return layer;
}

static const char *dgrad(void *w)
{
	return layer_of(QS_ROLE_DGRAD, true, 256, 64, 128, w, DY);
}

static const char *wgrad(void *x)
{
	return layer_of(QS_ROLE_WGRAD, true, 256, 128, 64, x, DY);
}

START_TEST(backward_products_have_the_layer_of_their_forward_one)
{
	ck_assert_str_eq(forward("one", W1, X1), "one");
	ck_assert_str_eq(forward("two", W2, X2), "two");
	ck_assert_str_eq(dgrad(W2), "two");
	ck_assert_str_eq(wgrad(X2), "two");
	ck_assert_str_eq(dgrad(W1), "one");
	ck_assert_str_eq(wgrad(X1), "one");
	ck_assert_ptr_null(dgrad(DY));
	ck_assert_ptr_null(wgrad(W2 + 16));
}
END_TEST

/* Conv1D keeps its weight by inputs: dX is TN, which has no role, and dW' = dY' X has X second. */
START_TEST(weights_kept_by_inputs_are_found_too)
{
	qs_label_push("c_attn");
	ck_assert_str_eq(layer_of(QS_ROLE_UNKNOWN, false, 128, 64, 256, W1, X1), "c_attn");
	qs_label_pop();
	ck_assert_str_eq(layer_of(QS_ROLE_UNKNOWN, true, 256, 64, 128, W1, DY), "c_attn");
	ck_assert_str_eq(layer_of(QS_ROLE_WGRAD, true, 128, 256, 64, DY, X1), "c_attn");
}
END_TEST

START_TEST(last_layer_that_read_an_address_has_it)
{
	forward("embedding", W1, X1);
	forward("lm_head", W1, X2);
	ck_assert_str_eq(dgrad(W1), "lm_head");
	ck_assert_str_eq(wgrad(X2), "lm_head");
	ck_assert_str_eq(wgrad(X1), "embedding");
	forward("other", W2, X1);
	ck_assert_str_eq(wgrad(X1), "other");
}
END_TEST

START_TEST(address_that_holds_another_shape_is_not_taken_for_it)
{
	forward("one", W1, X1);
	ck_assert_ptr_null(layer_of(QS_ROLE_DGRAD, true, 512, 64, 128, W1, DY));
	ck_assert_ptr_null(layer_of(QS_ROLE_WGRAD, true, 512, 128, 64, X1, DY));
}
END_TEST

START_TEST(forward_product_outside_ranges_has_no_layer)
{
	forward("one", W1, X1);
	ck_assert_ptr_null(layer_of(QS_ROLE_FWD, false, 128, 64, 256, W1, X1));
	ck_assert_str_eq(dgrad(W1), "one");
}
END_TEST

/* Activation checkpointing: the range is there again, on the backward thread, with a new input. */
START_TEST(recomputed_forward_product_renews_its_input)
{
	forward("one", W1, X1);
	qs_label_push("something else");
	ck_assert_str_eq(layer_of(QS_ROLE_UNKNOWN, true, 128, 64, 256, W1, X2), "one");
	ck_assert_str_eq(layer_of(QS_ROLE_UNKNOWN, true, 128, 64, 256, W2, X2), "something else");
	qs_label_pop();
	ck_assert_str_eq(wgrad(X2), "something else");
}
END_TEST

START_TEST(gradient_product_in_a_range_teaches_nothing)
{
	qs_label_push("MmBackward0");
	ck_assert_str_eq(dgrad(W1), "MmBackward0");
	qs_label_pop();
	ck_assert_ptr_null(dgrad(W1));
}
END_TEST

START_TEST(what_cannot_be_stored_is_not_found)
{
	forward("unaligned", W1 + 2, X1);
	ck_assert_ptr_null(dgrad(W1 + 2));
	forward("absent", NULL, X1);
	ck_assert_ptr_null(dgrad(NULL));
	forward("high", (void *)0x1000000000000, X1);
	ck_assert_ptr_null(dgrad((void *)0x1000000000000));
}
END_TEST

START_TEST(recent_addresses_stay)
{
	for (uintptr_t i = 1; i <= 100000; i++)
		forward("many", (void *)(i * 4096), (void *)(i * 4096 + 512));
	int found = 0;
	for (uintptr_t i = 99001; i <= 100000; i++)
		found += dgrad((void *)(i * 4096)) != NULL;
	ck_assert_int_ge(found, 990);
	ck_assert_ptr_null(dgrad((void *)4096));
}
END_TEST

START_TEST(child_forgets_addresses_and_keeps_names)
{
	forward("one", W1, X1);
	qs_label_forked();
	qs_layer_forked();
	ck_assert_ptr_null(dgrad(W1));
	ck_assert_str_eq(forward("one", W1, X1), "one");
}
END_TEST

/* ---- rules --------------------------------------------------------------------------------------
 */

START_TEST(rules_see_the_layer)
{
	static const char text[] = "[qshim]\nversion = 1\n[rule head]\nlayer = *lm_head*\n"
	                           "action = native\n[default]\naction = fp8\n";
	struct qs_policy *policy = qs_policy_parse("test.ini", text, strlen(text));
	struct qs_plan plan = {.key = plain_key(128, 64, 256)};
	qs_decide(&plan, policy, false);
	ck_assert_str_eq(plan.rule, "default");
	qs_label_push("model.lm_head");
	plan = (struct qs_plan){.key = plain_key(128, 64, 256)};
	plan.key.layer = qs_label_current();
	qs_decide(&plan, policy, false);
	ck_assert_str_eq(plan.rule, "head");
	ck_assert_int_eq(plan.action, QS_ACTION_NATIVE);
	qs_policy_free(policy);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("label");
	TCase *ranges = tcase_create("ranges"), *layers = tcase_create("layers");
	tcase_add_test(ranges, nothing_is_named_before_the_first_range);
	tcase_add_test(ranges, innermost_range_names);
	tcase_add_test(ranges, nameless_range_has_the_name_around_it);
	tcase_add_test(ranges, depth_is_told_from_zero);
	tcase_add_test(ranges, domains_may_overlap);
	tcase_add_test(ranges, ranges_beyond_the_bound_have_the_last_name);
	tcase_add_test(ranges, overlong_name_loses_its_end);
	tcase_add_test(ranges, same_name_is_same_number);
	tcase_add_test(ranges, names_beyond_the_bound_are_none);
	tcase_add_test(ranges, threads_have_ranges_of_their_own);
	tcase_add_test(ranges, threads_agree_on_numbers);
	tcase_add_test(layers, backward_products_have_the_layer_of_their_forward_one);
	tcase_add_test(layers, weights_kept_by_inputs_are_found_too);
	tcase_add_test(layers, last_layer_that_read_an_address_has_it);
	tcase_add_test(layers, address_that_holds_another_shape_is_not_taken_for_it);
	tcase_add_test(layers, forward_product_outside_ranges_has_no_layer);
	tcase_add_test(layers, recomputed_forward_product_renews_its_input);
	tcase_add_test(layers, gradient_product_in_a_range_teaches_nothing);
	tcase_add_test(layers, what_cannot_be_stored_is_not_found);
	tcase_add_test(layers, recent_addresses_stay);
	tcase_add_test(layers, child_forgets_addresses_and_keeps_names);
	tcase_add_test(layers, rules_see_the_layer);
	suite_add_tcase(suite, ranges);
	suite_add_tcase(suite, layers);
	return qs_suite_main(suite);
}
