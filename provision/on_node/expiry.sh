# Powers this machine off when it has expired; with `show`, prints the expiry in epoch seconds.
# provision/user_data.py sets the variables before these lines: launch_expires, expires_file.

later=
# Builtins only: a machine without memory for a new process must not fall back to the earlier time.
read -r later 2>/dev/null <"$expires_file"
case $later in
    [1-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]) expires=$later ;;
    *) expires=$launch_expires ;;
esac
if [ "${1-}" = show ]; then
    echo "$expires"
    exit 0
fi
# If the clock can't be read, keep the machine running; the next check is in half a minute.
now=$(date +%s) && [ "$now" -ge "$expires" ] || exit 0
echo "<4>expired: powering off"
systemctl poweroff || systemctl poweroff --force --force
