/* The embedded policies: config/NAME.ini, included by preset_text.S.
 *
 * A new preset is a file there, two lines in preset_text.S and two here.
 */
#include <string.h>

#include "policy/policy.h"

extern const char qs_preset_default[], qs_preset_default_end[];
extern const char qs_preset_observe[], qs_preset_observe_end[];
extern const char qs_preset_lossless[], qs_preset_lossless_end[];
extern const char qs_preset_fp8_training[], qs_preset_fp8_training_end[];
extern const char qs_preset_careful[], qs_preset_careful_end[];
extern const char qs_preset_nf4_decode[], qs_preset_nf4_decode_end[];
extern const char qs_preset_qlora[], qs_preset_qlora_end[];

struct preset {
	const char *name;       /* what QSHIM_POLICY calls it     */
	const char *text, *end; /* the file, without a NUL at end */
};

static const struct preset presets[] = {
        {"default", qs_preset_default, qs_preset_default_end},
        {"observe", qs_preset_observe, qs_preset_observe_end},
        {"lossless", qs_preset_lossless, qs_preset_lossless_end},
        {"fp8-training", qs_preset_fp8_training, qs_preset_fp8_training_end},
        {"careful", qs_preset_careful, qs_preset_careful_end},
        {"nf4-decode", qs_preset_nf4_decode, qs_preset_nf4_decode_end},
        {"qlora", qs_preset_qlora, qs_preset_qlora_end},
};

#define PRESETS ((int)(sizeof presets / sizeof *presets))

const char *qs_preset_name(int index)
{
	return index >= 0 && index < PRESETS ? presets[index].name : NULL;
}

const char *qs_preset_text(const char *name, size_t *length)
{
	for (int i = 0; i < PRESETS; i++) {
		if (strcmp(presets[i].name, name))
			continue;
		*length = (size_t)(presets[i].end - presets[i].text);
		return presets[i].text;
	}
	return NULL;
}
