/* Fuzzes the reader of policies: whatever the bytes, it must not crash or hang, and a policy that
 * is taken must choose without fault and read back, once shown, as the same policy.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/policy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char *shown(const struct qs_policy *policy, size_t *length)
{
	*length = qs_policy_show(policy, NULL, 0);
	char *text = malloc(*length + 1);
	if (!text || qs_policy_show(policy, text, *length + 1) != *length)
		abort();
	return text;
}

static void choose_some(struct qs_policy *policy)
{
	const char *layers[] = {NULL, "", "model.layers.3.mlp.up_proj", "lm_head"};
	for (int i = 0; i < 16; i++) {
		struct qs_key key = {
		        .m = INT64_C(1) << 3 * i, .n = 4096, .k = 1000 * i, .ta = i & 1};
		key.role = (uint8_t)(i % QS_ROLE_COUNT);
		key.entry = (uint8_t)(i % QS_ENTRY_COUNT);
		struct qs_subject subject = {&key, layers[i % 4], i - 1, i - 1, 10 * (i & 1)};
		struct qs_choice choice = qs_policy_choose(policy, &subject);
		if (choice.rule < -1 || choice.rule >= qs_policy_rule_count(policy))
			abort();
		qs_policy_process_allowed(policy, qs_policy_rule_name(policy, choice.rule));
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct qs_policy *policy = qs_policy_parse("fuzz", (const char *)data, size);
	if (!policy)
		return 0;
	size_t length, length_again;
	char *text = shown(policy, &length);
	struct qs_policy *again = qs_policy_parse("shown", text, length);
	if (!again)
		abort();
	char *text_again = shown(again, &length_again);
	if (length != length_again || memcmp(text, text_again, length))
		abort();
	choose_some(policy);
	free(text);
	free(text_again);
	qs_policy_free(again);
	qs_policy_free(policy);
	return 0;
}
