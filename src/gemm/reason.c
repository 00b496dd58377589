/* The reason codes as text, straight from the one list in reason.h. An index out of range, which
 * can only come from a damaged counters file, is answered like "error" so that readers need no
 * check. */
#include "gemm/reason.h"

/* One row of QS_REASONS. */
struct row {
	const char *code; /* stable spelling         */
	const char *text; /* what happened           */
	const char *cure; /* what to do about it     */
};

static const struct row rows[QS_REASON_COUNT] = {
#define QS_REASON_ROW(name, code, what, cure) [QS_REASON_##name] = {code, what, cure},
        QS_REASONS(QS_REASON_ROW)
#undef QS_REASON_ROW
};

static const struct row *row_of(enum qs_reason reason)
{
	return &rows[(unsigned)reason < QS_REASON_COUNT ? reason : QS_REASON_ERROR];
}

const char *qs_reason_code(enum qs_reason reason)
{
	return row_of(reason)->code;
}

const char *qs_reason_text(enum qs_reason reason)
{
	return row_of(reason)->text;
}

const char *qs_reason_cure(enum qs_reason reason)
{
	return row_of(reason)->cure;
}
