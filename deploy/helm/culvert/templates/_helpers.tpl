{{- define "culvert.labels" -}}
app.kubernetes.io/part-of: culvert
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "culvert.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "culvert.imageFields" -}}
image: {{ include "culvert.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "culvert.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Who tells of the mesh, and who signs. */ -}}
{{- define "culvert.plane" -}}
{{- if .Values.controlPlane.enabled -}}
https://culvert-controlplane.{{ .Release.Namespace }}.svc:15012
{{- else -}}
https://istiod.istio-system.svc:15012
{{- end }}
{{- end }}

{{- define "culvert.securityContext" -}}
runAsUser: 0
runAsGroup: 0
readOnlyRootFilesystem: true
{{- with .Values.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq .Values.profile "privileged" }}
privileged: true
{{- else }}
privileged: false
# Kubernetes refuses `false` beside SYS_ADMIN.
allowPrivilegeEscalation: true
# The runtime's profile for AppArmor denies ptrace, and so the sight of pods' networks, and writing sysctls.
appArmorProfile: {type: Unconfined}
capabilities:
  drop: [ALL]
  add:
    # Pods' rules, routes, tc filters, transparent sockets and marks.
    - NET_ADMIN
    # DNS answers that are sent in the name of the server that the pod has asked.
    - NET_RAW
    # setns(2) into pods' networks. Also makes /proc/sys writable, which the runtime mounts read-only, for pods' sysctls:
    # procMount: Unmasked is granted in user namespaces only.
    - SYS_ADMIN
    # /proc/PID/ns/net and /proc/PID/root of pods' processes: where a pod's network and resolv.conf are.
    - SYS_PTRACE
    # Programs and maps, and what the verifier allows only whom it trusts with the kernel's addresses. SYS_ADMIN stands in for
    # both; they are named for rules that ask for them by name.
    - BPF
    - PERFMON
    # Before Linux 5.11 maps count as locked memory, whose limit must be raised; also the limit of open files.
    - SYS_RESOURCE
{{- end }}
{{- end }}

{{- /* Makes a node's process one that removes every trace at its end. All nodes may do so at once. */ -}}
{{- define "culvert.leave" -}}
spec:
  updateStrategy:
    rollingUpdate: {maxSurge: "100%"}
  template:
    metadata:
      labels: {culvert.io/leaves: "true"}
    spec:
      containers:
        - name: culvert
          env:
            - {name: CULVERT_EPHEMERAL, value: "true"}
{{- end }}

{{- define "culvert.kubectl" -}}
image: {{ .Values.uninstall.image | quote }}
command: [kubectl]
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
{{- end }}
