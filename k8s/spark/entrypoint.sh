#!/bin/bash
# The entry point that Spark on Kubernetes requires: `driver ARGUMENTS` and `executor`, with SPARK_* variables. From
# https://github.com/apache/spark/blob/master/resource-managers/kubernetes/docker/src/main/dockerfiles/spark/entrypoint.sh
# because pip's PySpark does not include it. It writes no files, so the root file system can be read-only. It has no
# decom.sh, because spark.decommission.enabled is off by default.
set -euo pipefail

case "${1:-}" in
  driver)
    shift
    set -- "$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
      --deploy-mode client "$@"
    ;;
  executor)
    # SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 and so on: one option each, in this order. Options can contain spaces.
    options=()
    for ((number = 0; ; number++)); do
      name=SPARK_JAVA_OPT_$number
      [[ -v $name ]] || break
      options+=("${!name}")
    done
    # Configuration first, then spark.executor.extraClassPath, then Spark.
    classpath=${SPARK_CONF_DIR:-$SPARK_HOME/conf}${HADOOP_CONF_DIR:+:$HADOOP_CONF_DIR}
    classpath+=${SPARK_CLASSPATH:+:$SPARK_CLASSPATH}:$SPARK_HOME/jars/*
    set -- "${JAVA_HOME:+$JAVA_HOME/bin/}java" "${options[@]}" \
      "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$classpath" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
      --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
      --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
esac

exec tini -s -- "$@"
