# A disk made from an image loads a block from S3 when it is first read, at a few MB/s one by one:
# https://docs.aws.amazon.com/ebs/latest/userguide/initalize-volume.html
# This reads what the first job needs, in many pieces at a time. A container's disk is no such device.
[ -b "$(findmnt -no SOURCE /)" ] && [ -d /opt/spr-cluster ] || exit 0
# Besides the stack: the packages of `bake --packages`, and the compiler that torch.compile runs.
found() {
    find /opt/spr-cluster /home/*/spr-packages /usr/lib/python3* /usr/bin/python3* /usr/lib/x86_64-linux-gnu \
        /usr/lib/gcc /usr/libexec/gcc /usr/bin/x86_64-linux-gnu-* /usr/include -xdev -type f "$@" 2>/dev/null
}
found ! -size +16383k -print0 | xargs -0 -r -P 8 -n 64 cat >/dev/null &
found -size +16383k -printf '%s %p\n' | while read -r size path; do
    for piece in $(seq 0 $((size / 16777216))); do printf '%s\0%s\0' "$piece" "$path"; done
done | xargs -0 -r -P 16 -n 2 sh -c 'dd if="$1" of=/dev/null bs=1M count=16 skip=$(($0 * 16)) status=none'
wait
