/** Labels of a device: what its app says of it, such as `region` = `eu`. Spec: docs/spec/wire.md §2. */
package dev.muster.device

private const val MOST_LABELS = 16
private const val LONGEST_BYTES = 64
private val NAME = Regex("[a-z][a-z0-9_]{0,31}")

/** Check the labels that an app states. Throws [ConfigException], which names the label and the limit. */
internal fun checkLabels(labels: Map<String, String>) {
    if (labels.size > MOST_LABELS) throw ConfigException("${labels.size} labels are too many: a device has at most $MOST_LABELS")
    for ((name, value) in labels) {
        checkLabelName(name)
        if (value.any(Char::isISOControl) || !Charsets.UTF_8.newEncoder().canEncode(value)) {
            throw ConfigException("label $name: its value must be text without control characters")
        }
        val size = utf8(value).size
        if (size !in 1..LONGEST_BYTES) throw ConfigException("label $name: its value must have 1 to $LONGEST_BYTES bytes, not $size")
    }
}

/** Throws [ConfigException] unless labels may be called so. */
internal fun checkLabelName(name: String) {
    if (!NAME.matches(name)) {
        throw ConfigException("label ${Json.write(name)}: a name has 1 to 32 of a-z, 0-9 and _, and begins with a letter")
    }
}
