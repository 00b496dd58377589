/* Whole steps of a program are compared with what auto replaces and without: which steps are made
 * how, what the verdict does, and what it does not touch. What it is made of is seen in
 * tests/unit/test_worth.c. A step is one product here, so that the program's are as many as its
 * calls. */
#include "tuning.h"

#include <stdio.h>
#include <string.h>

const struct scene scenes[] = {{"loop", scene_loop}, {NULL, NULL}};

/* ---- tests --------------------------------------------------------------------------------------
 */

#define UNCHECKED "numerics.check_every=0;" ENOUGH

/* Calls until the first turn: of the last four, three begin a step that nothing new comes in, after
 * 1024 and some that recur, and one shows what is replaced in a step. What our kernels compute is
 * needed for the first few. */
#define BEFORE WAITING, "4", KNOB, "idle_kernels=1", WAITING, "1027"
#define PARTS  3 /* of the scene, before what comes next */

/* The turns of a round: of four steps, with what is replaced (0) or without (1). */
#define ROUND                                                                                      \
	WAITING, "4", WAITING, "4", WAITING, "4", WAITING, "4", WAITING, "4", WAITING, "4",        \
	        WAITING, "4", WAITING, "4"
static const int turns[] = {0, 1, 1, 0, 1, 0, 0, 1};
#define TURNS ((int)(sizeof turns / sizeof *turns))

/* After it, the steps until its events are looked at. The next begins with what comes of that. */
#define PAUSE WAITING, "4"

/* Microseconds of the device: what is saved is so much that an idle device is of no account. */
static const struct times much = {.product = 50000, .fp8 = 1000, .second = 1000};
#define SLOWER KNOB, "fp8_us=60000"
#define EVEN   KNOB, "fp8_us=50000"

static const char *const *worth(const char *policy)
{
	return with(policy, much, IDLE);
}

static void ck_unharmed(void)
{
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_int_eq((int)printed(&outcome, "failed"), 0);
}

static void ck_part(int number, long native, long replaced)
{
	char part[16];
	snprintf(part, sizeof part, "part%d", number);
	ck_products(part, native, replaced, 0);
}

/* The turns of a round, from part `first` on. */
static void ck_round(int first)
{
	for (int i = 0; i < TURNS; i++)
		ck_part(first + i, turns[i] ? 4 : 0, turns[i] ? 0 : 4);
}

START_TEST(the_program_gets_its_own_products_back_if_it_is_not_faster)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE, SLOWER,
	          ROUND, PAUSE, WAITING, "1", WAITING, "200", NULL);
	ck_unharmed();
	ck_round(PARTS + 1);
	ck_part(PARTS + 1 + TURNS, 0, 4);
	ck_part(PARTS + 2 + TURNS, 1, 0);
	ck_part(PARTS + 3 + TURNS, 200, 0);
	ck_assert_int_eq(outcome.decisions, 2);
	ck_assert_str_eq(outcome.decision[0].action, "fp8");
	ck_assert_str_eq(outcome.decision[1].action, "native");
	ck_assert_str_eq(outcome.decision[1].reason, "steps");
	ck_assert_str_eq(outcome.decision[1].detail,
	                 "a step takes 60.000 ms with what was replaced, 50.000 without");
	ck_assert_int_eq(only_counter(&outcome)->action, QS_ACTION_NATIVE);
	ck_assert_int_eq(only_counter(&outcome)->reason, QS_REASON_STEPS);
	ck_assert_uint_eq(total_late(&outcome), 0);
}
END_TEST

START_TEST(what_makes_it_faster_stays_and_is_not_compared_again)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE, ROUND,
	          PAUSE, WAITING, "1", WAITING, "1000", NULL);
	ck_unharmed();
	ck_round(PARTS);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(count((const char *[]){"part11", "part12", "part13"}[i], "native"),
		                 0);
	ck_assert_int_eq(outcome.decisions, 1);
}
END_TEST

/* Eight rounds, and the pause after each. */
START_TEST(no_gain_is_none_after_as_many_rounds_as_there_are)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE, EVEN,
	          ROUND, PAUSE, WAITING, "252", WAITING, "1", WAITING, "100", NULL);
	ck_unharmed();
	ck_round(PARTS + 1);
	ck_part(PARTS + 1 + TURNS, 0, 4);
	ck_part(PARTS + 2 + TURNS, 7 * 16, 252 - 7 * 16);
	ck_part(PARTS + 3 + TURNS, 1, 0);
	ck_part(PARTS + 4 + TURNS, 100, 0);
	ck_assert_str_eq(outcome.decision[1].reason, "steps");
}
END_TEST

/* Nothing is compared where the choice was not ours. */
static const struct {
	const char *name, *policy;
} others[] = {
        {"demanded", UNCHECKED "default.action=fp8"},
        {"kept", "tune.host_bound=keep;" UNCHECKED "default.action=auto"},
        {"shadow", "qshim.mode=shadow;" UNCHECKED "default.action=auto"},
};

START_TEST(what_auto_did_not_choose_is_not_held_back)
{
	run_scene(&outcome, SHIMMED, worth(others[_i].policy), "loop", BEFORE, SLOWER, WAITING,
	          "300", NULL);
	ck_unharmed();
	const bool shadow = !strcmp(others[_i].name, "shadow");
	ck_part(PARTS + 1, shadow ? 300 : 0, shadow ? 0 : 300);
	ck_assert_int_eq(outcome.decisions, 1);
}
END_TEST

/* In the second turn: what is captured is not held back, and the comparison begins anew after it,
 * as it does in another stream, in the own one of each thread, and on a device that was reset. */
static const struct {
	const char *how, *count;
	long replaced;
	const char *again; /* steps until the next comparison */
} interruptions[] = {
        {CAPTURED, "100", 100, "3"}, {STREAM, "", 0, "4"}, {OWN, "", 0, "4"}, {RESET, "", 0, "4"}};

START_TEST(an_interrupted_comparison_begins_anew)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE, SLOWER,
	          WAITING, "4", WAITING, "2", interruptions[_i].how, interruptions[_i].count,
	          WAITING, interruptions[_i].again, ROUND, PAUSE, WAITING, "1", NULL);
	ck_unharmed();
	ck_part(PARTS + 1, 0, 4);
	ck_part(PARTS + 2, 2, 0);
	ck_part(PARTS + 3, 0, interruptions[_i].replaced);
	ck_part(PARTS + 4, 0, interruptions[_i].again[0] - '0');
	ck_round(PARTS + 5);
	ck_part(PARTS + 6 + TURNS, 1, 0);
	ck_assert_str_eq(outcome.decision[outcome.decisions - 1].reason, "steps");
	/* those of a device that was reset went with it */
	if (strcmp(interruptions[_i].how, RESET) != 0)
		ck_assert_int_eq((int)printed(&outcome, "events"), 0);
}
END_TEST

/* After the marking step, the first of a round, the last one, and amid the pause. */
static const char *const steps_before_a_reset[] = {"0", "1", "32", "34"};

START_TEST(a_comparison_begins_anew_whenever_the_device_is_reset)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE, SLOWER,
	          WAITING, steps_before_a_reset[_i], RESET, "", WAITING, "4", ROUND, PAUSE, WAITING,
	          "1", NULL);
	ck_unharmed();
	ck_part(PARTS + 3, 0, 4);
	ck_round(PARTS + 4);
	ck_part(PARTS + 5 + TURNS, 1, 0);
	ck_assert_str_eq(outcome.decision[outcome.decisions - 1].reason, "steps");
}
END_TEST

/* Each has a stream of its own, with the same handle: a turn without ends with the thread that
 * began it, and another one's steps are compared for themselves. */
START_TEST(steps_in_the_own_streams_of_threads_are_not_mixed)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE, SLOWER,
	          WAITING, "4", OWN, "", WAITING, "10", THREAD, "10", WAITING, "1", THREAD, "1",
	          WAITING, "1", THREAD, "1", THREAD, "1", WAITING, "3", ROUND, PAUSE, WAITING, "1",
	          NULL);
	ck_unharmed();
	ck_part(PARTS + 3, 2, 8);
	ck_part(PARTS + 4, 2, 8);
	for (int i = 5; i < 11; i++)
		ck_part(PARTS + i, 0, i < 10 ? 1 : 3);
	ck_round(PARTS + 11);
	ck_part(PARTS + 12 + TURNS, 1, 0);
	ck_assert_int_eq((int)printed(&outcome, "events"), 0);
}
END_TEST

/* In the second turn, and back after a while: what was decided before is prepared, and compared all
 * the same. */
#define AUTO_POLICY "[qshim]\nversion = 1\n[default]\naction = auto\n"
static const struct {
	const char *policy;
	bool native;
} edits[] = {
        {"[qshim]\nversion = 1\n[default]\naction = native\n", true},
        {"[qshim]\nversion = 1\n[default]\naction = fp8\n", false},
        {"[qshim]\nversion = 1\nmode = off\n[default]\naction = auto\n", true},
};

/* As worth(), but for the rule, which is in a file that the scene may edit. */
static char folder[256], policy_file[320];

static const char *const *worth_by_file(void)
{
	make_directory(folder);
	snprintf(policy_file, sizeof policy_file, "QSHIM_POLICY=%s/policy.ini", folder);
	FILE *file = fopen(strchr(policy_file, '/'), "w");
	ck_assert_ptr_nonnull(file);
	fputs(AUTO_POLICY, file);
	fclose(file);
	return with(UNCHECKED, much, policy_file);
}

static void ck_edited(int number, long calls, bool native)
{
	ck_part(number, native ? calls : 0, native ? 0 : calls);
}

START_TEST(an_edit_amid_a_comparison_begins_it_anew)
{
	run_scene(&outcome, SHIMMED, worth_by_file(), "loop", KNOB, "idle_products=1", BEFORE,
	          SLOWER, WAITING, "4", WAITING, "2", EDIT, edits[_i].policy, WAITING, "100", EDIT,
	          AUTO_POLICY, WAITING, "3", ROUND, PAUSE, WAITING, "1", NULL);
	remove_directory(folder);
	ck_unharmed();
	ck_part(PARTS + 2, 0, 4);
	ck_part(PARTS + 3, 2, 0);
	ck_edited(PARTS + 4, 1, edits[_i].native);
	ck_edited(PARTS + 5, 100, edits[_i].native);
	ck_part(PARTS + 6, 0, 1);
	ck_part(PARTS + 7, 0, 3);
	ck_round(PARTS + 8);
	ck_part(PARTS + 9 + TURNS, 1, 0);
	ck_assert_str_eq(outcome.decision[outcome.decisions - 1].reason, "steps");
	ck_assert_int_eq((int)printed(&outcome, "events"), 0);
}
END_TEST

/* Nor does it matter to what is being compared. */
START_TEST(an_edit_that_decides_nothing_anew_does_not_disturb_a_comparison)
{
	run_scene(&outcome, SHIMMED, worth_by_file(), "loop", KNOB, "idle_products=1", BEFORE,
	          SLOWER, WAITING, "4", WAITING, "2", EDIT,
	          AUTO_POLICY "[rule other]\nm = 7\naction = native\n", WAITING, "1", WAITING, "28",
	          WAITING, "1", NULL);
	remove_directory(folder);
	ck_unharmed();
	ck_part(PARTS + 3, 2, 0);
	ck_part(PARTS + 4, 1, 0);
	ck_part(PARTS + 5, 1, 0);
	ck_part(PARTS + 7, 1, 0);
	ck_assert_str_eq(outcome.decision[outcome.decisions - 1].reason, "steps");
}
END_TEST

/* While events are made, nothing is compared in this run; while they are recorded, the comparison
 * begins anew. 33 are made. */
static const struct {
	const char *knob;
	bool again;
} failures[] = {{"fail_event=5", false}, {"fail_event=36", true}};

START_TEST(an_event_that_fails_holds_nothing_back)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", WAITING, "4",
	          KNOB, failures[_i].knob, KNOB, "idle_kernels=1", WAITING, "1027", SLOWER, WAITING,
	          "2", WAITING, "3", WAITING, "300", WAITING, "1", NULL);
	ck_unharmed();
	ck_part(PARTS + 2, 0, 2);
	ck_part(PARTS + 3, 0, 3);
	if (failures[_i].again)
		ck_assert_str_eq(outcome.decision[1].reason, "steps");
	else
		ck_part(PARTS + 4, 0, 300);
	ck_part(PARTS + 5, failures[_i].again, !failures[_i].again);
}
END_TEST

/* What the first run found holds for the second, at once; a pin, whatever was found. */
static const struct {
	bool slower;      /* in the first run */
	const char *edit; /* of the row, before the second */
	const char *reason, *detail;
} runs[] = {
        {true, "", "steps", "a step takes 60.000 ms with what was replaced, 50.000 without"},
        {false, "", "auto", NULL},
        {true, "pinned = yes\naction = auto\n", "auto", NULL},
        {false, "pinned = yes\naction = native\n", "steps",
         "a step takes 1.000 ms with what was replaced, 50.000 without"},
};

START_TEST(what_was_found_holds_for_the_next_run)
{
	char directory[256], path[300], set[512], text[4096];
	make_directory(directory);
	snprintf(path, sizeof path, "%s/tuned.ini", directory);
	snprintf(set, sizeof set, UNCHECKED "default.action=auto;tune.file=%s", path);
	const char *speed = runs[_i].slower ? "fp8_us=60000" : "fp8_us=1000";
	run_scene(&outcome, SHIMMED, worth(set), "loop", BEFORE, KNOB, speed, ROUND, PAUSE, WAITING,
	          "1", NULL);
	ck_unharmed();
	ck_round(PARTS + 1);
	ck_part(PARTS + 2 + TURNS, runs[_i].slower, !runs[_i].slower);
	FILE *file = fopen(path, "r");
	ck_assert_ptr_nonnull(file);
	text[fread(text, 1, sizeof text - 1, file)] = 0;
	fclose(file);
	char *row = strstr(text, "[product]\nkey = step of 1 products, ");
	ck_assert_msg(row != NULL, "%s", text);
	ck_assert_msg(strstr(row, runs[_i].slower ? "\naction = native\n" : "\naction = auto\n"),
	              "%s", row);
	if (*runs[_i].edit) {
		*strstr(row, "action = ") = 0;
		file = fopen(path, "a");
		ck_assert_ptr_nonnull(file);
		fprintf(file, "%s%s", row, runs[_i].edit);
		fclose(file);
	}
	run_scene(&outcome, SHIMMED, worth(set), "loop", BEFORE, KNOB, speed, ROUND, PAUSE, WAITING,
	          "1", NULL);
	ck_unharmed();
	const bool lost = !strcmp(runs[_i].reason, "steps");
	for (int i = 0; i < TURNS + 1; i++)
		ck_part(PARTS + 1 + i, lost ? 4 : 0, lost ? 0 : 4);
	ck_assert_int_eq(outcome.decisions, 1 + lost);
	ck_assert_str_eq(outcome.decision[lost].reason, runs[_i].reason);
	if (lost)
		ck_assert_str_eq(outcome.decision[1].detail, runs[_i].detail);
	/* with other arguments it is another program, which is compared for itself */
	run_scene(&outcome, SHIMMED, worth(set), "loop", BEFORE, KNOB, speed, ROUND, PAUSE, WAITING,
	          "2", NULL);
	remove_directory(directory);
	ck_unharmed();
	ck_assert_int_gt(count("part7", "first"), 0);
	ck_assert_int_gt(count("part5", "native"), 0);
}
END_TEST

/* A pin is obeyed whatever comes of it. */
START_TEST(a_pinned_row_is_not_compared)
{
	char directory[256], path[300], set[512];
	make_directory(directory);
	snprintf(path, sizeof path, "%s/tuned.ini", directory);
	snprintf(set, sizeof set, UNCHECKED "default.action=auto;tune.file=%s", path);
	run_scene(&outcome, SHIMMED, worth(set), "loop", WAITING, "4", NULL);
	FILE *file = fopen(path, "w");
	ck_assert_ptr_nonnull(file);
	fprintf(file, "[product]\nkey = %s\nmeasured = fp8\npinned = yes\naction = fp8\n",
	        outcome.decision[0].key);
	fclose(file);
	run_scene(&outcome, SHIMMED, worth(set), "loop", BEFORE, SLOWER, WAITING, "300", NULL);
	remove_directory(directory);
	ck_unharmed();
	ck_part(PARTS + 1, 0, 300);
	ck_assert_int_eq(outcome.decisions, 1);
}
END_TEST

/* Batches of any length: their products differ, and new ones come all the time, but the steps are
 * known and so is what they are made of. Here 64 lengths of three buckets, each of which is
 * measured; the first turn is made after all of them. */
#define ANY_BEFORE VARYING, "40", KNOB, "idle_kernels=1", VARYING, "980"

START_TEST(steps_of_any_length_are_compared)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", ANY_BEFORE,
	          SLOWER, VARYING, "100", VARYING, "600", VARYING, "601", NULL);
	ck_unharmed();
	ck_assert_int_gt(count("part4", "first"), 16);
	ck_part(5, 600, 0);
	ck_part(6, 601, 0);
	int said = 0, decided = 0;
	for (int i = 0; i < outcome.decisions; i++) {
		const struct decision *decision = &outcome.decision[i];
		const bool lost = !strcmp(decision->reason, "steps");
		const bool other = !strcmp(decision->detail, "found with other tokens");
		said += lost && !other;
		decided += lost && other;
	}
	ck_assert_int_eq(said, 64);
	ck_assert_int_eq(decided, 64);
}
END_TEST

START_TEST(what_makes_steps_of_any_length_faster_stays)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", ANY_BEFORE,
	          VARYING, "100", VARYING, "600", NULL);
	ck_unharmed();
	ck_part(3, 16, 84);
	ck_part(4, 0, 600);
}
END_TEST

/* The program has gone on to something without steps, in a turn without what is replaced. */
START_TEST(what_is_held_back_comes_back_where_no_step_begins)
{
	run_scene(&outcome, SHIMMED, worth(UNCHECKED "default.action=auto"), "loop", BEFORE,
	          WAITING, "5", RANDOM, "1000", RANDOM, "80000", RANDOM, "100", NULL);
	ck_unharmed();
	ck_part(PARTS, 1, 4);
	ck_part(PARTS + 1, 1000, 0);
	ck_assert_int_eq(outcome.decisions, 3); /* the others are small */
	ck_assert_int_gt(count("part5", "first"), (80000 - 3 * 16384) / 3 / 2);
	ck_assert_int_gt(count("part6", "first"), 100 / 3 / 2);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("worth");
	TCase *tcase = tcase_create("worth");
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, the_program_gets_its_own_products_back_if_it_is_not_faster);
	tcase_add_test(tcase, what_makes_it_faster_stays_and_is_not_compared_again);
	tcase_add_test(tcase, no_gain_is_none_after_as_many_rounds_as_there_are);
	tcase_add_loop_test(tcase, what_auto_did_not_choose_is_not_held_back, 0,
	                    (int)(sizeof others / sizeof *others));
	tcase_add_loop_test(tcase, an_interrupted_comparison_begins_anew, 0,
	                    (int)(sizeof interruptions / sizeof *interruptions));
	tcase_add_loop_test(tcase, a_comparison_begins_anew_whenever_the_device_is_reset, 0,
	                    (int)(sizeof steps_before_a_reset / sizeof *steps_before_a_reset));
	tcase_add_test(tcase, steps_in_the_own_streams_of_threads_are_not_mixed);
	tcase_add_loop_test(tcase, an_edit_amid_a_comparison_begins_it_anew, 0,
	                    (int)(sizeof edits / sizeof *edits));
	tcase_add_test(tcase, an_edit_that_decides_nothing_anew_does_not_disturb_a_comparison);
	tcase_add_loop_test(tcase, an_event_that_fails_holds_nothing_back, 0,
	                    (int)(sizeof failures / sizeof *failures));
	tcase_add_loop_test(tcase, what_was_found_holds_for_the_next_run, 0,
	                    (int)(sizeof runs / sizeof *runs));
	tcase_add_test(tcase, a_pinned_row_is_not_compared);
	tcase_add_test(tcase, steps_of_any_length_are_compared);
	tcase_add_test(tcase, what_makes_steps_of_any_length_faster_stays);
	tcase_add_test(tcase, what_is_held_back_comes_back_where_no_step_begins);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
