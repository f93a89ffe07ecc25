# Ends this machine when its time is up; with `show` it prints that time instead, in epoch seconds.
# provision/user_data.py puts the values before these lines: launch_expires, expires_file.

told=
# Builtins only: a machine without memory for another process must not fall back to the earlier time.
read -r told 2>/dev/null <"$expires_file"
case $told in
    [1-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]) expires=$told ;;
    *) expires=$launch_expires ;;
esac
if [ "${1-}" = show ]; then
    echo "$expires"
    exit 0
fi
# What could not find out the time must not end the machine; it is asked again in half a minute.
now=$(date +%s) && [ "$now" -ge "$expires" ] || exit 0
echo "<4>the time to live is over: powering off"
systemctl poweroff || systemctl poweroff --force --force
