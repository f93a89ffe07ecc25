# Powers this machine off when it has expired; with `show`, prints deadline, latest end, and grace period
# (seconds). provision/user_data.py sets the variables before these lines: launch_expires, launch_latest,
# launch_grace, expires_file, hold, checks, first_boot.

expires='' latest='' grace=''
# Builtins only: a machine without memory for a new process must not fall back to the earlier time.
{ read -r expires && read -r latest grace; } 2>/dev/null <"$expires_file"
date='[1-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]'
case "$expires $latest" in
    $date\ $date) ;;
    *) expires=$launch_expires latest=$launch_latest grace=$launch_grace ;;
esac
case $grace in '' | *[!0-9]*) grace=0 ;; esac
[ "$latest" -ge "$expires" ] || latest=$expires
if [ "${1-}" = show ]; then
    echo "$expires $latest $grace"
    exit 0
fi
is_new() { made=$(stat -c %Y "$first_boot" 2>/dev/null) && [ $((since - made)) -lt 300 ]; }
# If the clock can't be read, keep the machine running; the next check is in half a minute.
now=$(date +%s) || exit 0
# Since when each check has followed the one before, without a start, a suspension, or a change of the
# clock. If that can't be noted, it counts as long ago.
checked='' since=''
{ read -r checked since; } 2>/dev/null <"$checks"
case "$checked $since" in
    $date\ $date) ;;
    *) checked=0 ;;
esac
if [ "$now" -lt "$checked" ] || [ $((now - checked)) -ge 180 ]; then since=$now; fi
echo "$now $since" >"$checks" || since=0
[ "$now" -ge "$expires" ] || exit 0
if [ "$now" -lt "$latest" ] && [ -e "$hold" ]; then
    # The head holds this machine for results that nobody has fetched: keeper.py.
    held=$(stat -c %Y "$hold") && [ $((now - held)) -ge 180 ] || exit 0
fi
# If these checks began around or after the deadline, the keeper needs time to hold the machine, and the user
# to fetch results. A machine that has just been created has none.
if [ "$since" -ge $((expires - 120)) ] && [ $((now - since)) -lt 300 ] && ! is_new; then
    [ "$now" -ge "$latest" ] || exit 0
    # After the latest end, only the first of several boots in a row waits, and only once: a machine that
    # keeps rebooting, or is too busy for regular checks, must end too.
    { read -r boot; } 2>/dev/null </proc/sys/kernel/random/boot_id || boot=unknown
    { read -r waited; } 2>/dev/null <"$expires_file.waited" || waited=''
    last=0
    case $waited in "$latest "*) last=$(stat -c %Y "$expires_file.waited") ;; esac
    [ "$waited" != "$latest $boot" ] || [ $((now - last)) -ge 300 ] || exit 0
    [ "$waited" = "$latest $boot" ] || [ $((now - last)) -lt 900 ] ||
        { echo "$latest $boot" >"$expires_file.waited"; exit 0; }
fi
echo "<4>expired: powering off"
systemctl poweroff || systemctl poweroff --force --force
