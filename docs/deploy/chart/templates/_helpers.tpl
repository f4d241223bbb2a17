{{/* Names, labels, and what all pods have in common. */}}

{{- define "mlxd.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "mlxd.labels" -}}
app.kubernetes.io/name: mlxd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mlxd.metadata" -}}
{{ include "mlxd.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* (chart, image) */}}
{{- define "mlxd.image" -}}
image: "{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .image.pullPolicy }}
{{- end }}

{{- define "mlxd.secret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-token" (include "mlxd.name" .)) -}}
{{- end }}

{{- define "mlxd.claim" -}}
{{- .Values.models.existingClaim | default (printf "%s-models" (include "mlxd.name" .)) -}}
{{- end }}

{{/* All read the token when they start: another one starts them anew. */}}
{{- define "mlxd.restartsWithToken" -}}
annotations:
  checksum/token: {{ .Values.auth.token | default "" | sha256sum }}
{{- end }}

{{- define "mlxd.podSecurity" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "mlxd.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Whether controller and workers ask for the token: it travels over TLS alone. */}}
{{- define "mlxd.guarded" -}}
{{- if and .Values.tls.existingSecret .Values.auth.enabled }}true{{ end -}}
{{- end }}

{{/* (root, token): where credentials are mounted; group 10001 may read them. */}}
{{- define "mlxd.mounts" -}}
- {name: scratch, mountPath: /tmp}
- {name: home, mountPath: /var/lib/mlxd}
{{- if .root.Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/mlxd/tls, readOnly: true}
{{- end }}
{{- if .token }}
- {name: token, mountPath: /etc/mlxd/token, readOnly: true}
{{- end }}
{{- end }}

{{/* (root, token); 288 is 0440 */}}
{{- define "mlxd.volumes" -}}
- {name: scratch, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- with .root.Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 288}}
{{- end }}
{{- if .token }}
- {name: token, secret: {secretName: {{ include "mlxd.secret" .root }}, defaultMode: 288}}
{{- end }}
{{- end }}

{{/* What a gRPC server of mlxd's listens with. Kubernetes asks for health without a token. */}}
{{- define "mlxd.listener" -}}
{{- if not (include "mlxd.guarded" .) -}}
- --allow-remote
{{ end -}}
{{- if .Values.tls.existingSecret -}}
- --tls-cert
- /etc/mlxd/tls/tls.crt
- --tls-key
- /etc/mlxd/tls/tls.key
{{ end -}}
{{- if include "mlxd.guarded" . -}}
- --token-file
- /etc/mlxd/token/token
- --open-health
{{ end -}}
{{- end }}

{{/* (root, port): gRPC's health service; kubelet speaks no TLS to it, so there the client asks. */}}
{{- define "mlxd.probes" -}}
{{- $check := printf "grpc: {port: %d}" (int .port) -}}
{{- if .root.Values.tls.existingSecret -}}
{{- $words := list "mlxd" "health" "--address" (printf "localhost:%d" (int .port)) "--tls-ca" "/etc/mlxd/tls/ca.crt" -}}
{{- $check = printf "exec: {command: %s}" (toJson $words) -}}
{{- end -}}
startupProbe:
  {{ $check }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
readinessProbe:
  {{ $check }}
  periodSeconds: 10
  timeoutSeconds: 10
livenessProbe:
  {{ $check }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- define "mlxd.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
