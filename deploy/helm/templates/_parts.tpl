{{- define "raylm.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "raylm.volumes" -}}
{{- with .Values.models.claim }}
volumes: [{name: models, persistentVolumeClaim: {claimName: {{ . }}}}]
{{- end }}
{{- end }}

{{- define "raylm.mounts" -}}
{{- if .Values.models.claim }}
volumeMounts: [{name: models, mountPath: /models}]
{{- end }}
{{- end }}

{{- define "raylm.env" -}}
{{- if .Values.models.claim }}
- {name: HF_HOME, value: /models}
{{- end }}
{{- with .Values.keysSecret }}
- name: RAYLM_KEYS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: keys}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
