package dev.muster.device.secagg
internal class SecaggException(message: String) : Exception(message)
internal class Credential(val device: ByteArray, val expires: Long)
internal fun checkCredential(authority: ByteArray, own: ByteArray, credential: ByteArray, now: Long): Credential = TODO("$authority $own $credential $now")
internal fun sign(key: dev.muster.device.SigningKey, purpose: String, vararg parts: ByteArray): ByteArray = TODO("$key $purpose $parts")
