#!/bin/sh
# Takes this node out of the queue if EC2 is about to take it back, or while a disk is full. slurmd runs
# it as root every 5 seconds. While all is well, it is one `stat` and one `find`, and on a spot node one `curl`.
folder=/run/spr-cluster-health
# The last decision: none, disk, or spot. Without it, as after a reboot, Slurm knows.
memory=$folder/drained
least_mib=100
least_inodes=100
imds=http://169.254.169.254/latest

[ -d $folder ] || mkdir -m 700 $folder
known=unknown
[ ! -e $memory ] || read -r known <$memory
# A node must not come and go at the limit.
[ "$known" != disk ] || least_mib=$((2 * least_mib))

ask() { curl --silent --noproxy '*' --connect-timeout 1 --max-time 2 "$@"; }

get_token() {
    token=$(ask --fail -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 21600' $imds/api/token) || return 1
    (umask 077 && echo "$token" >$folder/token)
}

# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
get() { ask --write-out '\n%{http_code}' -H "X-aws-ec2-metadata-token: $token" $imds/meta-data/"$1"; }

is_spot() {
    if [ -e $folder/market ]; then
        read -r market <$folder/market
    elif [ -e $folder/no-imds ] && [ -n "$(find $folder/no-imds -mmin -5)" ]; then
        return 1
    elif get_token && market=$(get instance-life-cycle) && [ -z "${market##*200}" ]; then
        market=${market%%[!a-z-]*}
        echo "$market" >$folder/market
    else
        : >$folder/no-imds
        return 1
    fi
    [ "$market" = spot ]
}

find_notice() {
    is_spot || return 0
    [ -e $folder/token ] || get_token || return 0
    read -r token <$folder/token
    notice=$(get spot/instance-action)
    case $notice in
    *200) echo "spot: EC2 takes it back at $(echo "$notice" | sed -n 's/.*"time": *"\([^"]*\)".*/\1/p')" ;;
    *401) rm -f $folder/token ;;
    esac
}

find_full_disk() {
    stat -f -c '%a %S %c %d %n' /home/*/spr-jobs / 2>/dev/null |
        while read -r blocks size inodes free_inodes path; do
            free=$((blocks * size / 1048576))
            # Some file systems do not count inodes.
            if [ $free -lt $least_mib ]; then
                echo "disk: $path has $free MiB free"
            elif [ "$inodes" -gt 0 ] && [ "$free_inodes" -lt $least_inodes ]; then
                echo "disk: $path has $free_inodes inodes free"
            else
                continue
            fi
            break
        done
}

is_head() { grep -q "^NodeName=node0 NodeHostname=$(hostname) " /etc/slurm/slurm.conf; }

# The jobs that were submitted and that ended while this node was away: as the head, it would otherwise
# start them again. The newest files count.
catch_up() {
    runuser -u ubuntu -- sh -c 'cd /home/ubuntu/spr-jobs || exit 0
        ssh -n -o ConnectTimeout=5 node0 "cd spr-jobs && tar -H posix -cf - */run.sh */launch.json */end.json */cancelled" |
            tar --keep-newer-files -xf - || exit
        for job in *; do
            [ ! $job/end.json -nt $job/run.sh ] && [ ! $job/cancelled -nt $job/run.sh ] ||
                rm -f $job/environment.json
        done' >/dev/null 2>&1
}

# slurmctld asks for this check, so a node that is cut off does not run it.
[ -n "$(find $folder/seen -newermt '-30 seconds' 2>/dev/null)" ] || is_head || catch_up
[ $? != 0 ] || : >$folder/seen

reason=$(find_notice)
reason=${reason:-$(find_full_disk)}
[ "$known:$reason" != none: ] || exit 0

name=$(sed -n "s/^NodeName=\([^ ]*\) NodeHostname=$(hostname) .*/\1/p" /etc/slurm/slurm.conf)
[ -n "$name" ] || exit 0
# slurmd also runs this before it starts, perhaps before slurmctld: that must not take long.
shown=$(timeout 2 scontrol -o show node "$name") || exit 0
update() { timeout 10 scontrol update nodename="$name" "$@" || exit 0; }
state=${shown#* State=}
case ${state%% *} in
*DRAIN*) case ${shown#* Reason=} in disk:*) now=disk ;; spot:*) now=spot ;; *) now=other ;; esac ;;
*) now=none ;;
esac
case "$now ${reason%%:*}" in
spot*) ;;
*' spot' | 'none disk')
    update state=drain reason="$reason"
    now=${reason%%:*}
    ;;
'disk ')
    update state=resume
    now=none
    ;;
esac
# Whoever else drained it resumes it.
[ $now != other ] || now=none
echo $now >$memory
