/* What the tests of the policy share: hearing what is said on stderr, parsing, and making products.
 */
#ifndef QS_TESTS_UNIT_POLICY_H
#define QS_TESTS_UNIT_POLICY_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "policy/rule.h"
#include "tests/support/suite.h"

#define VERSION "[qshim]\nversion = 1\n"

/* What was written to stderr between listen_begin() and listen_end(). */
static char said[16384];
static FILE *listen_file;
static int listen_stderr;

static inline void listen_begin(void)
{
	listen_stderr = dup(STDERR_FILENO);
	listen_file = tmpfile();
	ck_assert_ptr_nonnull(listen_file);
	dup2(fileno(listen_file), STDERR_FILENO);
}

static inline void listen_end(void)
{
	dup2(listen_stderr, STDERR_FILENO);
	ssize_t length = pread(fileno(listen_file), said, sizeof said - 1, 0);
	said[length > 0 ? length : 0] = 0;
	fclose(listen_file);
	close(listen_stderr);
}

static inline struct qs_policy *parse_bytes(const char *text, size_t length)
{
	listen_begin();
	struct qs_policy *policy = qs_policy_parse("t.ini", text, length);
	listen_end();
	return policy;
}

/* A policy that must be good, without a word. */
static inline struct qs_policy *parse(const char *text)
{
	struct qs_policy *policy = parse_bytes(text, strlen(text));
	ck_assert_str_eq(said, "");
	ck_assert_ptr_nonnull(policy);
	return policy;
}

/* A text that must be refused with this one message; `message` begins with the line. */
static inline void refuses(const char *text, const char *message)
{
	char expected[2048];
	snprintf(expected, sizeof expected, "qshim: t.ini:%s\n", message);
	struct qs_policy *policy = parse_bytes(text, strlen(text));
	ck_assert_ptr_null(policy);
	ck_assert_str_eq(said, expected);
}

static inline struct qs_key key_of(int64_t m, int64_t n, int64_t k)
{
	return (struct qs_key){.m = m, .n = n, .k = k, .ta = 1, .entry = QS_ENTRY_LT_MATMUL};
}

static inline struct qs_subject subject_of(const struct qs_key *key)
{
	return (struct qs_subject){.key = key, .weight = -1, .step = -1};
}

/* True if a rule with these lines matches the subject. */
static inline bool rule_with(const char *conditions, const struct qs_subject *subject)
{
	char text[2048];
	snprintf(text, sizeof text, VERSION "[rule r]\naction = fp8\n%s\n", conditions);
	struct qs_policy *policy = parse(text);
	int rule = qs_policy_choose(policy, subject).rule;
	qs_policy_free(policy);
	return rule == 0;
}

static inline struct qs_choice choice_for(const char *text)
{
	struct qs_key key = key_of(4096, 4096, 4096);
	struct qs_subject subject = subject_of(&key);
	struct qs_policy *policy = parse(text);
	struct qs_choice choice = qs_policy_choose(policy, &subject);
	qs_policy_free(policy);
	return choice;
}

static inline char *shown(const struct qs_policy *policy)
{
	static char text[65536];
	ck_assert_uint_lt(qs_policy_show(policy, text, sizeof text), sizeof text);
	return text;
}

#endif
